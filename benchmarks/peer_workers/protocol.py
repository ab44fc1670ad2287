"""What a worker says and hears, over its standard streams. Imports nothing but Python.

The parent starts a worker with the specification as JSON in ``argv[1]``; the worker compiles,
warms up, and prints one JSON line. Then each ``run`` line makes it do one timed call and print its
seconds; ``learn`` makes it train to the end and print greedy returns; an empty input ends it.
A worker that waits for a line costs the other worker nothing.
"""

import json
import resource
import sys
import time


def specification():
    """The dictionary that the parent gave."""
    return json.loads(sys.argv[1])


def say(**content):
    """One JSON line to the parent, marked so that a library's own prints are not taken for it."""
    print("WORKER " + json.dumps(content), flush=True)


def peak_bytes():
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def serve(run, learn, **ready):
    """Announces readiness and answers until the parent is done.

    run: does one timed call and waits for its result. learn: returns a list of returns.
    """
    say(peak_bytes=peak_bytes(), **ready)
    for line in sys.stdin:
        if line.strip() == "run":
            begin = time.perf_counter()
            run()
            say(seconds=time.perf_counter() - begin, peak_bytes=peak_bytes())
        elif line.strip() == "learn":
            say(returns=learn())


def serve_compiled(fn, args, learn):
    """`serve` for a JAX function of `args`: compiled ahead of time, and its memory planned."""
    import jax

    begin = time.perf_counter()
    lowered = jax.jit(fn).lower(*args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    plan = compiled.memory_analysis()
    jax.block_until_ready(compiled(*args))
    serve(
        lambda: jax.block_until_ready(compiled(*args)),
        learn,
        trace=traced - begin,
        compile=done - traced,
        planned_bytes=plan.temp_size_in_bytes + plan.output_size_in_bytes if plan else None,
    )
