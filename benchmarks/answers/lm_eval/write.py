"""Writes a task of `vllm-kvx evaluate` as a task of lm-eval: a data set and its task file."""

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.questions import PreparedPrompt, Suite, load_tokenizer
from vllm_kvx.tools.evaluate.store import QuestionId

# lm-eval finds the `!function` where it runs in the checkout's folder.
TASK_FILE = """\
task: kvx_{task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
gen_prefix: "{{{{begins}}}}"
doc_to_target: "{{{{references[0]}}}}"
generation_kwargs:
  do_sample: false
  temperature: 0
  max_gen_toks: {max_tokens}
  until: []
process_results: !function benchmarks.answers.lm_eval.score.process_results
metric_list:
  - metric: score
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory or Hugging Face hub name, for its tokenizer")
    parser.add_argument("--task", default="notes_3", help="a generated task (default: notes_3)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], metavar="N")
    parser.add_argument("--samples", type=int, default=8, help="of each length (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="which questions (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("build/lm-eval"), metavar="DIR")
    args = parser.parse_args()
    try:
        suite = suite_of(args.task, args.lengths, args.samples, args.seed)
        written = write(suite, args.model, args.output)
    except ToolError as error:
        parser.error(str(error))
    print(f"{written}: lm-eval's task kvx_{args.task}, with --include_path {args.output}")
    return 0


def suite_of(task: str, lengths: Sequence[int], samples: int, seed: int) -> Suite:
    """The questions that `vllm-kvx evaluate` asks with these options.

    Raises:
        ToolError: `task` is no task whose prompts are generated.
    """
    made_to = tuple(sorted(set(lengths)))
    suite = Suite.of([task], None, lengths=made_to, samples=samples, seed=seed)
    if [each.name for each in suite.generated] != [task]:
        raise ToolError(f"--task {task}: name one task whose prompts are generated")
    return suite


def write(suite: Suite, model: str, output: Path) -> Path:
    """Writes data set and task file of a suite of one task into `output`; gives the task file.

    model: whose tokenizer measures the prompts.

    Raises:
        ToolError: no such tokenizer, or a length that is too short for the task.
    """
    with tqdm(unit=" prompts") as bar:
        load = functools.partial(load_tokenizer, model, None)
        prepared = suite.prepare(load, lambda done, total: bar.update(done - bar.n))
    (name,) = suite.names
    output.mkdir(parents=True, exist_ok=True)
    data, task = (output / f"{name}.jsonl").resolve(), output / f"kvx_{name}.yaml"
    with data.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(prepared))
    # A path as JSON is one as YAML.
    text = TASK_FILE.format(task=name, data=json.dumps(str(data)), max_tokens=suite.longest_answer)
    task.write_text(text, encoding="utf-8")
    return task


def rows(prepared: Mapping[QuestionId, PreparedPrompt]) -> Iterator[dict[str, Any]]:
    """What lm-eval reads of each question; task, length and index as `evaluate` stores them."""
    for question, prompt in prepared.items():
        sample = prompt.sample
        assert sample is not None, "only perplexity has no sample"
        yield {
            **asdict(question),
            "prompt": sample.text,
            "begins": sample.begins,
            "references": list(sample.references),
        }


if __name__ == "__main__":
    sys.exit(main())
