"""What a training run shows while it runs."""

import math
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from vllm_kvx.errors import ToolError


class Progress(TrainerCallback):
    """A bar over steps with the loss, and a line for each measurement of held-out answers."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit=" steps", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs: dict[str, Any] = others["logs"]
        for name, value in (("loss", logs.get("loss")), ("held-out KL", logs.get("held_out_kl"))):
            if value is not None and not math.isfinite(value):
                self.on_train_end(args, state, control)
                raise ToolError(
                    f"the {name} is {value} at step {state.global_step}: use a smaller --lr, and "
                    "another --out, with --examples of this one"
                )
        if self._bar is None:
            return
        if "loss" in logs:
            self._bar.set_postfix(loss=f"{logs['loss']:.3f}")
        if "held_out_greedy" in logs:
            found = {name.removeprefix("held_out_"): value for name, value in logs.items()}
            self._bar.write(f"step {state.global_step}, held out: {sentence(found)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._bar is not None:
            self._bar.close()


def sentence(found: Any) -> str:
    """Agreement in words; `found` as `Agreement.as_json` has it."""
    return (
        f"{found['greedy']:.1%} of the tokens as at full depth, KL {found['kl']:.3f} nats a token, "
        f"{found['same']:.1%} of {found['answers']} answers the same"
    )
