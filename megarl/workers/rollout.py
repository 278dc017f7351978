"""Generation: the job's engines, each fed by its lead rank; every rank gets every rollout."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import ConfigError
from megarl.observe.rollout_log import read_rollouts, rollout_file
from megarl.parallel.ranks import all_gather_objects
from megarl.reshard.gather import buckets
from megarl.rollout.engine import Engine
from megarl.rollout.multi_turn import generate_rollouts
from megarl.types import Prompt, Rollout
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker

PUSH_BUCKET_BYTES = 512 << 20


class RolloutWorker(Worker):
    """world_size / rollout.tp engines; ranks e * tp ... (e + 1) * tp - 1 belong to engine e, the first of them leads it.

    With `rollout.replay` there are no engines: `generate` reads the rollouts that another run recorded.
    """

    step = 0
    """The step under way, set by the flow: names the recording to replay and seeds the samples."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        rollout, parallel = self.config.rollout, self.config.parallel
        if rollout.tp > parallel.ranks_per_node:
            raise ConfigError(
                f"rollout.tp={rollout.tp} is more than parallel.ranks_per_node={parallel.ranks_per_node}: weights are "
                "handed to an engine through memory of its own machine, so an engine must fit on one"
            )
        self.engine: Engine | None = None
        self.engines = self.ranks.world // rollout.tp
        self.engine_index, position = divmod(self.ranks.rank, rollout.tp)
        self.leads = position == 0 and not rollout.replay
        self.version = 0

    def start(self) -> None:
        if self.leads:
            tp = self.config.rollout.tp
            engines_here = max(1, min(self.ranks.world, self.config.parallel.ranks_per_node) // tp)
            self.engine = Engine(
                self.config, self.engine_index, engines_here, first_device=self.ranks.local_rank
            )
            self.engine.start()

    def ready(self) -> None:
        with self.clock.phase("engine_start"):
            error = ""
            if self.engine is not None:
                try:
                    self.engine.wait_ready()
                except RuntimeError as failure:
                    error = str(failure)
            _raise_anywhere(error)

    def generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool = False) -> list[Rollout]:
        """`samples` conversations for each prompt, those of a prompt next to each other; the same list on every rank."""
        config = self.config
        with self.clock.phase("generate"):
            if config.rollout.replay:
                return self._replayed()
            error, mine = "", []
            if self.engine is not None:
                first = len(prompts) * self.engine_index // self.engines
                end = len(prompts) * (self.engine_index + 1) // self.engines
                try:
                    mine = generate_rollouts(
                        prompts[first:end],
                        self.engine,
                        self.context.chat,
                        config.rollout,
                        samples=samples,
                        greedy=greedy,
                        seed=config.run.seed * 1_000_003 + self.step,
                        first_group=first,
                    )
                except RuntimeError as failure:
                    error = str(failure)
            _raise_anywhere(error)
            return [rollout for share in all_gather_objects(mine) for rollout in share]

    def update_weights(self, actor: ActorWorker) -> None:
        """Give every engine the actor's weights under the next version number; all ranks take part."""
        with self.clock.phase("push_weights"):
            self.version = self.step
            if self.config.rollout.replay:
                return
            error = ""
            stream = buckets(actor.hf_tensors(), PUSH_BUCKET_BYTES)
            if self.engine is not None:
                try:
                    self.engine.wake()
                    self.engine.push(stream, self.version)
                except RuntimeError as failure:
                    error = str(failure)
            for _ in stream:  # the gather is collective: ranks without an engine, or with a failed one, go along
                pass
            _raise_anywhere(error)

    def sleep(self) -> None:
        """Leave the device to training."""
        if self.engine is not None:
            with self.clock.phase("sleep"):
                self.engine.sleep()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    def _replayed(self) -> list[Rollout]:
        return read_rollouts(rollout_file(self.config.rollout.replay, self.step))


def _raise_anywhere(error: str) -> None:
    """An engine's failure is raised on every rank, so that none waits for the others."""
    errors = [text for text in all_gather_objects(error) if text]
    if errors:
        raise ConfigError(errors[0])
