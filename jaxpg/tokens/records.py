"""What the token parts exchange: a language model as functions, a task, prompts and completions.

Axes: ``N`` sequences, ``L`` prompt columns, ``M`` new tokens, ``S`` columns of any sequence, ``V``
tokens of the vocabulary. Prompts are left-padded and completions right-padded, so a prompt's last
token and its answer's first stand side by side whatever their lengths.

**Padding is a negative position.** A token at position −1 is seen by no other token, and its
logits mean nothing. Positions therefore carry the whole attention mask: a query at position ``q``
sees the keys at positions ``0 … q`` of its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

from jaxpg.types import Info, Key, PyTree, TrainState


class LanguageModel(NamedTuple):
    """A model that writes tokens, as functions: any network library plugs in here.

    ``init(key) -> params``; ``apply(params, tokens[N, S], positions[N, S]) -> logits[N, S, V]``,
    float32, where ``logits[:, s]`` score the token after ``tokens[:, s]``. For generation
    ``init_cache(params, batch, length) -> cache`` with room for ``length`` columns, and
    ``apply_cached(params, tokens[N, S], positions[N, S], cache) -> (logits[N, S, V], cache)``
    for the next ``S`` columns. The two cache functions may be None; `generate` then needs
    ``use_cache=False``. ``max_length`` is the longest sequence, prompt and answer together.
    """

    init: Callable[[Key], PyTree]
    apply: Callable[[PyTree, Array, Array], Array]
    init_cache: Callable[[PyTree, int, int], PyTree] | None
    apply_cached: Callable[[PyTree, Array, Array, PyTree], tuple[Array, PyTree]] | None
    max_length: int
    vocab_size: int


class Prompts(NamedTuple):
    """A batch of prompts, left-padded, and what the verifier needs to know about each."""

    tokens: Array  # [N, L] int32
    mask: Array  # [N, L] bool, the last column true
    info: PyTree  # every leaf [N, …]


class Completions(NamedTuple):
    """What a model wrote after ``N`` prompts, right-padded."""

    tokens: Array  # [N, M] int32, the pad id after the end
    log_probs: Array  # [N, M] float32 at the sampling temperature, 0 after the end
    mask: Array  # [N, M] bool, up to and including the end token
    finished: Array  # [N] bool: the end token was written (or the task has none)


class Task(NamedTuple):
    """A task whose prompts and scores are made on the device.

    ``sample_prompts(key, n) -> (tokens[n, max_prompt], mask[n, max_prompt], info)``, a `Prompts`
    or a plain tuple; ``score(info, tokens[n, max_new], mask[n, max_new]) -> [n]`` in 0 … 1, where
    1 means right: the share of ones is what `evaluate` calls exact. Both are traced: no Python
    ``if`` on their values. ``eos_id=None``: every completion has exactly ``max_new`` tokens.

    Optional: ``targets(info) -> (tokens[n, max_new], mask[n, max_new])``, the right answers, for
    `warm_up` and for length statistics; ``evaluation_prompts(key, n)``, prompts to test on
    (held-out ones, or all there are), for `evaluate`.
    """

    name: str
    sample_prompts: Callable[[Key, int], Any]
    score: Callable[[PyTree, Array, Array], Array]
    vocabulary: tuple[str, ...]
    max_prompt: int
    max_new: int
    eos_id: int | None
    pad_id: int
    targets: Callable[[PyTree], tuple[Array, Array]] | None = None
    evaluation_prompts: Callable[[Key, int], Any] | None = None


class InitFn(Protocol):
    """How a token algorithm starts: from the model's own `init`, or from given parameters."""

    def __call__(self, key: Key, config: Any, *, params: PyTree | None = None) -> TrainState:
        """``(key, config) -> state``; `params` (after a warm-up, say) are copied."""
        ...


class TokenAlgorithm(NamedTuple):
    """An algorithm bound to its task and model: `init` and `step` as in `jaxpg.types.Algorithm`.

    Nothing in it is jitted. ``init`` raises `ValueError` on a bad combination of sizes;
    ``step(state, config) -> (state, info)`` is one batch of completions and its updates.
    """

    init: InitFn
    step: Callable[[TrainState, Any], tuple[TrainState, Info]]
    task: Task
    model: LanguageModel
