"""Sends SIGINT at random instants while JAX traces and compiles, and counts how often the first one has no effect.

    python tests/campaign/interruptions.py TIMES SEED

The last line that is printed is a JSON object. A SIGINT that never ends the work makes the script hang. No test runs
it: the script goes on in the process that was interrupted, and JAX does not always survive that.
"""

import json
import os
import random
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

from pfljax.folder import endings

endings.REPEAT_SECONDS = 0.5


def work(number):
    """Traces and compiles a new function."""

    def loss(x):
        for i in range(6):
            x = jnp.tanh(x @ x) + number * i
        return jax.lax.scan(lambda c, _: (jnp.sin(c) + number, None), x, None, length=3)[0].sum()

    jax.jit(jax.value_and_grad(loss))(jnp.ones((8, 8)) * number)


def interrupted(delay, draw):
    """Works until a SIGINT that is sent after a delay has ended it; how long that took."""
    sent = []

    def send():
        return (sent.append(time.perf_counter()), os.kill(os.getpid(), signal.SIGINT))

    timer = threading.Timer(delay, send)
    try:
        with endings.interruptible():
            timer.start()
            while True:
                work(draw.random())
    except KeyboardInterrupt:
        return time.perf_counter() - sent[0]


def play(times, seed):
    draw = random.Random(seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    work(0.5)  # imports what an interruption must not leave half imported
    sys.unraisablehook = lambda _: None  # it would print each KeyboardInterrupt that is dropped
    seconds = [interrupted(draw.uniform(0.001, 0.25), draw) for _ in range(times)]
    return {
        "interruptions": times,
        "repeated": sum(each > endings.REPEAT_SECONDS for each in seconds),
    }


if __name__ == "__main__":
    print(json.dumps(play(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
    os._exit(0)  # a normal exit can crash after an interrupted XLA call
