"""A typical task set of verifiers.v1."""

import verifiers.v1 as vf


class Greeting(vf.TaskData):
    answer: str = ""


class GreetingTask(vf.Task[Greeting]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Greetings(vf.Taskset[GreetingTask, vf.TasksetConfig]):
    def load(self):  # type: ignore[no-untyped-def]
        for number in range(3):
            data = Greeting(idx=number, prompt=f"Say hello {number}", answer=f"hello {number}")
            yield GreetingTask(data, self.config.task)


__all__ = ["Greetings"]
