"""GRPO and its relatives on token sequences, entirely on the device: a namespace of its own.

The parts: a model as functions (`LanguageModel`; `transformer_model` makes one), a task
(`Task`; `TASKS` lists those that come along), `generate` and `completion_log_probs`,
`sample_groups`, and the algorithms, which are one assembly of them. The array-level functions
(advantages, losses, KL estimators, masks) are jaxpg's own: they serve log-probs of any model.
"""

from jaxpg.tokens.algorithms import (
    ALGORITHMS,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    reinforce_pp,
    rloo,
)
from jaxpg.tokens.config import (
    CISPOConfig,
    DAPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    TokenConfig,
)
from jaxpg.tokens.dense_rewards import last_token_rewards
from jaxpg.tokens.evaluation import (
    Evaluation,
    answer_prompts,
    evaluate,
    format_completions,
    show_samples,
)
from jaxpg.tokens.groups import (
    Groups,
    group_log_probs,
    sample_groups,
    select_mixed_groups,
    split_groups,
)
from jaxpg.tokens.records import Completions, LanguageModel, Prompts, Task, TokenAlgorithm
from jaxpg.tokens.sampling import completion_log_probs, generate, positions_from_mask
from jaxpg.tokens.supervised import warm_up, warmed_up
from jaxpg.tokens.tasks import (
    TASKS,
    add_mod_task,
    addition_task,
    copy_task,
    make_task,
    position_score,
    reverse_task,
    say_n_task,
    sort_task,
)
from jaxpg.tokens.transformer import transformer_model

__all__ = [
    "ALGORITHMS",
    "TASKS",
    "CISPOConfig",
    "Completions",
    "DAPOConfig",
    "Evaluation",
    "GRPOConfig",
    "GSPOConfig",
    "Groups",
    "LanguageModel",
    "Prompts",
    "RLOOConfig",
    "ReinforcePPConfig",
    "Task",
    "TokenAlgorithm",
    "TokenConfig",
    "add_mod_task",
    "addition_task",
    "answer_prompts",
    "cispo",
    "completion_log_probs",
    "copy_task",
    "dapo",
    "dr_grpo",
    "evaluate",
    "format_completions",
    "generate",
    "group_log_probs",
    "grpo",
    "gspo",
    "last_token_rewards",
    "make_task",
    "position_score",
    "positions_from_mask",
    "reinforce_pp",
    "reverse_task",
    "rloo",
    "sample_groups",
    "say_n_task",
    "select_mixed_groups",
    "show_samples",
    "sort_task",
    "split_groups",
    "transformer_model",
    "warm_up",
    "warmed_up",
]
