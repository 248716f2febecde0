"""Generate until a signal interrupts, and show that the model still gives what it should; run by a test.

Arguments: bundle, prompt ids and the ids that greedy decoding gives, both as JSON.
"""

from __future__ import annotations

import json
import signal
import sys

from dsc.runtime import load

SELF = {"proposer": "self", "window": 5, "fallback": False}


def main(path: str, prompt: list[int], plain: list[int]) -> None:
    # The kernel's timer does what Ctrl-C does. A thread of Python's must not send the signal: it races with the
    # interpreter for the flag that a signal waits, and an interrupt may get lost.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    model = load(path, verify="never")
    interrupted = 0
    for seconds in (0.001, 0.003, 0.007, 0.02):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            while True:
                model.generate(prompt, 900, speculation=SELF)
        except KeyboardInterrupt:
            interrupted += 1
        assert list(model.generate(prompt, 40, speculation=SELF).ids) == plain[:40]
        more = model.stream([*prompt, *plain[:9]], 20, speculation=SELF, reuse_cache=True).finish()
        assert list(more.ids) == plain[9:29]
    print(f"interrupted {interrupted} times")


main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
