/* Cephes' expf: 2 units in the last place; included once for each width of vectors.
 *
 * The including file defines EXP (the function's name), TARGET (of its processors), FLOATS (a vector), V (an
 * intrinsic's name), ROUND (to the nearest integer) and ABOVE (a vector where another is not below a third, else 0).
 */
TARGET FLOATS EXP(FLOATS x) {
  const FLOATS low = V(set1_ps)(-87.3365f), one = V(set1_ps)(1.0f);
  FLOATS n = ROUND(V(mul_ps)(x, V(set1_ps)(1.44269504f)));
  n = V(max_ps)(V(set1_ps)(-126.0f), n);
  FLOATS r = V(fnmadd_ps)(n, V(set1_ps)(0.693359375f), x), y = V(set1_ps)(1.9875691500e-4f);
  r = V(fnmadd_ps)(n, V(set1_ps)(-2.12194440e-4f), r);
  y = V(fmadd_ps)(y, r, V(set1_ps)(1.3981999507e-3f));
  y = V(fmadd_ps)(y, r, V(set1_ps)(8.3334519073e-3f));
  y = V(fmadd_ps)(y, r, V(set1_ps)(4.1665795894e-2f));
  y = V(fmadd_ps)(y, r, V(set1_ps)(1.6666665459e-1f));
  y = V(fmadd_ps)(y, r, V(set1_ps)(5.0000001201e-1f));
  y = V(fmadd_ps)(y, V(mul_ps)(r, r), V(add_ps)(r, one));
  __typeof__(V(cvtps_epi32)(n)) power = V(slli_epi32)(V(add_epi32)(V(cvtps_epi32)(n), V(set1_epi32)(127)), 23);
  return ABOVE(x, low, V(mul_ps)(y, (FLOATS)power)); /* NaN stays NaN, -inf becomes 0 */
}

#undef EXP
#undef TARGET
#undef FLOATS
#undef V
#undef ROUND
#undef ABOVE
