"""The full-depth model's own answers, by vLLM: to a user's prompts, to generated lookups, and to
prompts that the model writes itself."""

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.engine import last_line, on_cpu, prepare_environment, wake_if_dead
from vllm_kvx.tools.tune_speed import selfwritten
from vllm_kvx.tools.tune_speed.dialogues import Dialogue, Further, Templated, read, templated
from vllm_kvx.tools.tune_speed.fitting import Wanted, fitted
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.plan import Plan
from vllm_kvx.tools.tune_speed.turns import continued

# Of the prompts that the model writes, those that come after a long text that has nothing to do
# with them.
AFTER_LONG = 0.33
# Answers whose beginning becomes the prompt's, among those of at least so many tokens.
BEGUN, SHORTEST_BEGUN = 0.2, 6
# Prompts that the model is asked to write for each that is wanted: some are empty or said before.
SPARE = 1.5
# Greedy answers of small models to open questions end in loops; nobody wants to keep those.
TEMPERATURE = 0.7


class Teacher:
    """vLLM with the checkpoint as it is, in full."""

    def __init__(self, model: str, revision: str | None, longest: int, options: dict[str, Any]):
        """longest: tokens of a prompt and its answer. options: keywords of ``LLM``.

        Raises:
            ToolError: the engine does not start.
        """
        prepare_environment()
        from vllm import LLM

        defaults: dict[str, Any] = {"seed": 0, "revision": revision, "max_model_len": longest}
        if on_cpu():
            defaults |= {"enforce_eager": True, "dtype": "float32"}
        try:
            self._llm: Any = LLM(model, **(defaults | options))
        except (ValueError, RuntimeError, TypeError, OSError) as error:
            raise ToolError(f"the teacher's engine does not start: {last_line(error)}") from error
        wake_if_dead(self._llm)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperatures: Sequence[float],
        stop: Sequence[int] = (),
        seed: int = 0,
    ) -> list[tuple[int, ...]]:
        """Token ids of the answers, with the token that ends one.

        stop: tokens that end an answer beside the model's own.

        Raises:
            ToolError: the engine fails.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMServerError
        from vllm.inputs import TokensPrompt

        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=limit,
                stop_token_ids=list(stop),
                seed=seed + number,
                detokenize=False,
            )
            for number, (limit, temperature) in enumerate(
                zip(max_tokens, temperatures, strict=True)
            )
        ]
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        try:
            outputs = self._llm.generate(asked, params, use_tqdm=True)
        except VLLMServerError as error:
            raise ToolError(f"the teacher's engine failed: {last_line(error)}") from error
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Ends the engine, which frees the device's memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


def examples(plan: Plan, teacher: Teacher, tokenizer: Any) -> list[Example]:
    """Prompts with the model's answers, in an order drawn by the seed.

    Raises:
        ToolError: a prompt cannot be read, or the model writes no prompts.
    """
    dialogues = asked(plan, teacher, tokenizer)
    longest = plan.max_length - plan.answer_tokens
    prompts: list[Sequence[int]] = []
    asking: list[Dialogue] = []
    found: list[tuple[Example, Further]] = []
    for dialogue, ids in dialogues:
        if len(ids.prompt) > longest:
            continue
        if ids.answer is not None:
            known = Example(ids.prompt, ids.answer[: plan.answer_tokens], dialogue.kind)
            found.append((known, dialogue.further))
        else:
            prompts.append(ids.prompt)
            asking.append(dialogue)
    left_out = len(dialogues) - len(prompts) - len(found)
    if left_out:
        print(f"{left_out} prompts of over {longest} tokens are left out")
    if not prompts and not found:
        raise ToolError(f"no prompt has at most {longest} tokens: use a greater --max-length")
    answers = teacher.answers(
        prompts,
        [plan.answer_tokens] * len(prompts),
        [TEMPERATURE if each.kind.startswith("own") else 0.0 for each in asking],
        seed=plan.seed,
    )
    own = [
        (Example(tuple(prompt), answer, dialogue.kind), dialogue.further)
        for prompt, answer, dialogue in zip(prompts, answers, asking, strict=True)
        if answer
    ]
    with_turns = continued(own + found, plan, teacher, tokenizer)
    rng = random.Random(f"order {plan.seed}")
    rng.shuffle(with_turns)
    return [begun(example, rng) for example in with_turns]


def begun(example: Example, rng: random.Random) -> Example:
    """The example, or in a share of the cases what is left of its answer after a part of it.

    That part is then the prompt's: requests that begin the answer themselves, as some evaluations
    do, have such prompts, and their last token is another than the template's.
    """
    if len(example.answer) < SHORTEST_BEGUN or rng.random() >= BEGUN:
        return example
    at = rng.randrange(1, len(example.answer) // 2 + 1)
    return replace(example, prompt=example.prompt + example.answer[:at], answer=example.answer[at:])


def asked(plan: Plan, teacher: Teacher, tokenizer: Any) -> list[tuple[Dialogue, Templated]]:
    """What the model is to answer, as text and as tokens."""
    dialogues = read(Path(plan.prompts), need_answers=False) if plan.prompts else []
    wanted = [
        Wanted(f"{plan.seed} {number}", length, None, number < plan.num_recitals, plan.turns)
        for number, length in enumerate(plan.lengths(plan.num_lookups))
    ]
    if plan.num_written:
        written = write_prompts(plan.num_written, plan.seed, teacher, tokenizer)
        behind = round(AFTER_LONG * len(written))
        wanted += [
            Wanted(f"{plan.seed} behind {number}", length, written[number])
            for number, length in enumerate(plan.lengths(behind))
        ]
        dialogues += written[behind:]
    given = [(dialogue, templated(dialogue, tokenizer)) for dialogue in dialogues]
    return given + fitted(wanted, tokenizer)


def write_prompts(count: int, seed: int, teacher: Teacher, tokenizer: Any) -> list[Dialogue]:
    """At most `count` user's turns that the model writes after its template's beginning."""
    prefix, stop = selfwritten.user_turn_prefix(tokenizer), selfwritten.stop_ids(tokenizer)
    tries = round(count * SPARE)
    turns = teacher.answers([prefix] * tries, [256] * tries, [1.0] * tries, stop, seed)
    texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
    written = selfwritten.dialogues(texts)[:count]
    if not written:
        raise ToolError("the model writes no prompts after its chat template: give --prompts")
    return written
