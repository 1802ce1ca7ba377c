"""Every generated task, and groups of them. A new one is its file and a row here."""

from vllm_kvx.evaluation.tasks.base import Task
from vllm_kvx.evaluation.tasks.code_lookup import CodeLookup
from vllm_kvx.evaluation.tasks.common_words import CommonWords
from vllm_kvx.evaluation.tasks.frequent_words import FrequentWords
from vllm_kvx.evaluation.tasks.niah import Needles
from vllm_kvx.evaluation.tasks.notes import Notes
from vllm_kvx.evaluation.tasks.question_first import QuestionFirst
from vllm_kvx.evaluation.tasks.several_words import SeveralWords
from vllm_kvx.evaluation.tasks.variable_tracking import VariableTracking

# Names and parameters of RULER's tasks are its own.
_RULER: tuple[Task, ...] = (
    Needles("niah_single_1", "RULER: one number in noise", "noise"),
    Needles("niah_single_2", "RULER: one number in prose", "prose"),
    Needles("niah_single_3", "RULER: one UUID in prose", "prose", value="uuid"),
    Needles("niah_multikey_1", "RULER: one number of four in prose", "prose", keys=4),
    Needles("niah_multikey_2", "RULER: one number among numbers alone", "needles"),
    Needles(
        "niah_multikey_3", "RULER: one UUID among UUIDs alone", "needles", key="uuid", value="uuid"
    ),
    Needles("niah_multivalue", "RULER: the four numbers of one key in prose", "prose", values=4),
    Needles(
        "niah_multiquery", "RULER: the numbers of four keys in prose", "prose", keys=4, queries=4
    ),
    VariableTracking(),
    CommonWords(),
    FrequentWords(),
)
_OWN: tuple[Task, ...] = (QuestionFirst(), SeveralWords(), CodeLookup())
_DEMO: tuple[Task, ...] = (
    Notes("notes", "the demo checkpoint's lookups, values of one word", words=1),
    Notes("notes_3", "the demo checkpoint's lookups, values of three words", words=3),
)
TASKS: dict[str, Task] = {task.name: task for task in (*_RULER, *_OWN, *_DEMO)}

# What `--tasks` takes for several names; `demo` is for tests/checkpoints/lookup-8l alone.
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(task.name for task in _RULER),
    "generated": tuple(task.name for task in (*_RULER, *_OWN)),
    "quick": ("niah_single_2", "niah_multikey_1", "question_first", "several_words"),
    "demo": tuple(task.name for task in _DEMO),
}
