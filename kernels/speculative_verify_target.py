"""The target's filtered distribution in standard operators: a step of the bodies of `SpeculativeVerify`.

Expects ``logits``, the sampling parameters and the common values of a body; leaves ``p`` [B, K + 1, V].
"""

# Filters become a logit `cut` below which nothing stays. It is looked for among the most likely tokens (the highest of
# each group lead to them). A row whose top-p needs more of them is halved instead, down to gaps below the rounding of
# logits, as a whole sort costs ten times that. Where over the vocabulary is five times slower than a product.
TARGET_STEPS = """
  axes_row = Constant <value_ints = [1, 2]> ()
  temperature3 = Unsqueeze (temperature, axes_row)
  scaled = Div (logits, temperature3)
  plain = Softmax <axis = -1> (scaled)
  top_k64 = Cast <to = 7> (top_k)
  k_low = Greater (top_k64, zero)
  k_high = Less (top_k64, vocab)
  k_wanted = And (k_low, k_high)
  p_wanted = Less (top_p, one_f)
  m_wanted = Greater (min_p, zero_f)
  kp_wanted = Or (k_wanted, p_wanted)
  any_wanted = Or (kp_wanted, m_wanted)
  any_wanted_i = Cast <to = 6> (any_wanted)
  any_wanted_max = ReduceMax <keepdims = 0> (any_wanted_i)
  filtering = Cast <to = 9> (any_wanted_max)
  p = If (filtering) <
    then_branch = filtered () => (float[batch, rows, vocab] kept_p) {
      top = ReduceMax <keepdims = 1> (plain, axis2)
      lowest = Constant <value_float = -inf> ()
      kp_wanted_i = Cast <to = 6> (kp_wanted)
      kp_wanted_max = ReduceMax <keepdims = 0> (kp_wanted_i)
      cutting = Cast <to = 9> (kp_wanted_max)
      cut = If (cutting) <
        then_branch = by_rank () => (float[batch, rows, one_column] rank_cut) {
          k_wanted3 = Unsqueeze (k_wanted, axes_row)
          p_wanted3 = Unsqueeze (p_wanted, axes_row)
          k3 = Unsqueeze (top_k64, axes_row)
          share3 = Unsqueeze (top_p, axes_row)
          k_used = Where (k_wanted, top_k64, zero)
          k_most = ReduceMax <keepdims = 0> (k_used)
          usual_width = Constant <value_int = 256> ()
          enough_for_k = Max (k_most, usual_width)
          width = Min (enough_for_k, vocab)
          width1 = Unsqueeze (width, axis0)
          kept_dims = Constant <value_ints = [0, 0, -1]> ()
          group_narrow1 = Unsqueeze (group_narrow, axis0)
          narrow_shape = Concat <axis = 0> (kept_dims, group_narrow1)
          in_groups = Reshape (logits, narrow_shape)
          axis_member = Constant <value_ints = [3]> ()
          group_tops = ReduceMax <keepdims = 0> (in_groups, axis_member)
          n_groups1 = Shape <start = 2, end = 3> (group_tops)
          n_leading = Min (n_groups1, width1)
          leading_tops, leading = TopK <axis = -1> (group_tops, n_leading)
          leading4 = Unsqueeze (leading, axis_member)
          candidates4 = GatherND <batch_dims = 2> (in_groups, leading4)
          candidates = Reshape (candidates4, kept_dims)
          head, head_at = TopK <axis = -1> (candidates, width1)
          minus1 = Constant <value_ints = [-1]> ()
          most = Constant <value_ints = [9223372036854775807]> ()
          head_top = Slice (head, axis0, axis1, axis2)
          head_end = Slice (head, minus1, most, axis2)
          below_top = Sub (head, head_top)
          below_top_scaled = Div (below_top, temperature3)
          head_ratio = Exp (below_top_scaled)
          head_p = Mul (head_ratio, top)
          top_shape1 = Shape (top)
          k_size = Min (k3, width)
          k_size_or_one = Max (k_size, one)
          k_index = Sub (k_size_or_one, one)
          k_at = Expand (k_index, top_shape1)
          kth = GatherElements <axis = 2> (head, k_at)
          k_cut = Where (k_wanted3, kth, lowest)
          in_k = GreaterOrEqual (logits, k_cut)
          in_k_f = Cast <to = 1> (in_k)
          p_in_k = Mul (plain, in_k_f)
          mass_in_k = ReduceSum <keepdims = 1> (p_in_k, axis2)
          goal = Mul (mass_in_k, share3)
          head_in_k = GreaterOrEqual (head, k_cut)
          head_p_in_k = Where (head_in_k, head_p, zero_f)
          head_mass = Cast <to = 11> (head_p_in_k)
          two = Constant <value_int = 2> ()
          reach_d = CumSum (head_mass, two)
          reach = Cast <to = 1> (reach_d)
          enough = GreaterOrEqual (reach, goal)
          enough_i = Cast <to = 6> (enough)
          p_at = ArgMax <axis = 2, keepdims = 1> (enough_i)
          pth = GatherElements <axis = 2> (head, p_at)
          reach_end = Slice (reach, minus1, most, axis2)
          in_head = GreaterOrEqual (reach_end, goal)
          in_head_or_all = Not (p_wanted3)
          settled = Or (in_head, in_head_or_all)
          head_cut = Where (p_wanted3, pth, k_cut)
          settled_i = Cast <to = 6> (settled)
          settled_min = ReduceMin <keepdims = 0> (settled_i)
          all_settled = Cast <to = 9> (settled_min)
          rank_cut = If (all_settled) <
            then_branch = from_head () => (float[batch, rows, one_column] same_cut) {
              same_cut = Identity (head_cut)
            },
            else_branch = from_halving () => (float[batch, rows, one_column] halved_cut) {
              depth = Constant <value_float = 120.0> ()
              reach_down = Mul (temperature3, depth)
              nothing_below = Sub (head_top, reach_down)
              low_start = Max (nothing_below, k_cut)
              half = Constant <value_float = 0.5> ()
              halvings = Constant <value_int = 32> ()
              yes = Cast <to = 9> (one)
              low_end, high_end = Loop (halvings, yes, low_start, head_end) <
                body = halve (int64 turn, bool again, float[batch, rows, one_column] low,
                    float[batch, rows, one_column] high)
                    => (bool go_on, float[batch, rows, one_column] low_out,
                        float[batch, rows, one_column] high_out) {
                  go_on = Identity (again)
                  ends = Add (low, high)
                  middle = Mul (ends, half)
                  over_middle = GreaterOrEqual (logits, middle)
                  over_middle_f = Cast <to = 1> (over_middle)
                  p_over = Mul (p_in_k, over_middle_f)
                  mass_over = ReduceSum <keepdims = 1> (p_over, axis2)
                  is_enough = GreaterOrEqual (mass_over, goal)
                  low_out = Where (is_enough, middle, low)
                  high_out = Where (is_enough, high, middle)
                }>
              halved_cut = Where (settled, head_cut, low_end)
            }>
        },
        else_branch = by_no_rank () => (float[batch, rows, one_column] no_cut) {
          top_shape = Shape (top)
          no_cut = Expand (lowest, top_shape)
        }>
      min_p3 = Unsqueeze (min_p, axes_row)
      floor = Mul (top, min_p3)
      above_cut = GreaterOrEqual (logits, cut)
      above_floor = GreaterOrEqual (plain, floor)
      kept = And (above_cut, above_floor)
      kept_f = Cast <to = 1> (kept)
      kept_mass = Mul (plain, kept_f)
      total = ReduceSum <keepdims = 1> (kept_mass, axis2)
      kept_p = Div (kept_mass, total)
    },
    else_branch = whole_row () => (float[batch, rows, vocab] all_p) {
      all_p = Identity (plain)
    }>
"""
