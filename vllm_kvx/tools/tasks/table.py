"""Every task, and groups of them. A new one is its file and a row here."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks import longbench, ruler_files
from vllm_kvx.tools.tasks.base import SECOND_TURN, FixedTask, Task
from vllm_kvx.tools.tasks.code_lookup import CodeLookup
from vllm_kvx.tools.tasks.common_words import CommonWords
from vllm_kvx.tools.tasks.frequent_words import FrequentWords
from vllm_kvx.tools.tasks.instructions import Instructions
from vllm_kvx.tools.tasks.longbench import LongBench
from vllm_kvx.tools.tasks.niah import Needles
from vllm_kvx.tools.tasks.notes import Notes
from vllm_kvx.tools.tasks.question_first import QuestionFirst
from vllm_kvx.tools.tasks.several_words import LongPhrase, SeveralWords
from vllm_kvx.tools.tasks.short_answers import ShortCode, ShortFacts
from vllm_kvx.tools.tasks.variable_tracking import VariableTracking

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
# What a small chat model answers, too; a wrong answer ends soon.
_QUICK: tuple[Task, ...] = (
    Needles(
        "one_number", "one number in prose, answered in short; --quick", "prose", max_tokens=16
    ),
)
# Answers that are much longer than what `after=` waits for.
_LONG: tuple[Task, ...] = (
    Needles(
        "many_values",
        "the sixteen numbers of one key in prose: some 150 tokens",
        "prose",
        values=16,
        max_tokens=256,
    ),
    LongPhrase(),
)
# What `vllm-kvx calibrate` asks beside these.
_CALIBRATION: tuple[Task, ...] = (
    Notes(
        "notes_alone",
        "the demo checkpoint's lookups, values of one word in a text of notes alone",
        words=1,
        prose=False,
    ),
)
TASKS: dict[str, Task] = {
    task.name: task for task in (*_RULER, *_OWN, *_DEMO, *_QUICK, *_LONG, *_CALIBRATION)
}
_SHORT: tuple[FixedTask, ...] = (ShortFacts(), ShortCode(), Instructions())
# Tasks whose samples come with the package, each as long as it is.
FIXED: dict[str, FixedTask] = {task.name: task for task in _SHORT}

# Names for several tasks; `demo` is for tests/checkpoints/lookup-8l alone.
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(task.name for task in _RULER),
    "generated": tuple(task.name for task in (*_RULER, *_OWN)),
    "quick": ("niah_single_2", "niah_multikey_1", "question_first", "several_words"),
    "lookups": tuple(task.name for task in _OWN),
    "long_answers": tuple(task.name for task in _LONG),
    "demo": tuple(task.name for task in _DEMO),
    "short": tuple(FIXED),
    "longbench": longbench.NAMES,
}
# Of each task one: what results are summed up by.
_PARTITION = ("ruler", "lookups", "demo", "short", "longbench")


def group_of(name: str) -> str:
    """The group that a task's results are summed up with; a task of none is its own."""
    name = name.removesuffix(SECOND_TURN)
    if name.startswith(ruler_files.PREFIX):
        return "ruler"
    return next((family for family in _PARTITION if name in GROUPS[family]), name)


def tasks_named(
    names: Sequence[str],
    longbench_folder: Path | None = None,
    ruler_folder: Path | None = None,
) -> list[Task | FixedTask]:
    """The tasks of these names and groups, each once, in this order.

    longbench_folder: where LongBench's files are; None for the hub. With a folder, the group
        `longbench` is those of its tasks that the folder has.
    ruler_folder: where files of RULER are, for tasks named `ruler_...`.

    Raises:
        ToolError: a name is neither a task nor a group, or a folder does not have its file.
    """
    single: dict[str, None] = {}
    files: dict[str, FixedTask] = {}
    for name in names:
        if name == "longbench" and longbench_folder is not None:
            data_sets = longbench.data_sets_in(longbench_folder)
            single |= dict.fromkeys(longbench.PREFIX + data_set for data_set in data_sets)
        elif name.startswith(ruler_files.PREFIX):
            found = {task.name: task for task in ruler_files.named(name, ruler_folder)}
            files, single = files | found, single | dict.fromkeys(found)
        elif name in GROUPS:
            single |= dict.fromkeys(GROUPS[name])
        elif name in TASKS or name in FIXED or name in longbench.NAMES:
            single[name] = None
        else:
            raise ToolError(_unknown(name))
    return [
        TASKS.get(name)
        or FIXED.get(name)
        or files.get(name)
        or LongBench(name.removeprefix(longbench.PREFIX), longbench_folder)
        for name in single
    ]


def _unknown(name: str) -> str:
    known = [*TASKS, *FIXED, *GROUPS, *longbench.NAMES]
    close = get_close_matches(name, known, n=1)
    return (
        f"unknown task {name!r}{f' (meant {close[0]!r}?)' if close else ''}: tasks are "
        f"{', '.join([*TASKS, *FIXED])}, longbench_<data set> and ruler_<file>; groups are "
        f"{', '.join([*GROUPS, ruler_files.GROUP])}"
    )
