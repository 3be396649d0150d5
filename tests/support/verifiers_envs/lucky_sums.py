"""Sums, as an environment of verifiers with two weighted rewards; it fails where an answer is "crash"."""

import verifiers.v1 as vf

__all__ = ["LuckySums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        if trace.last_reply == "crash":
            raise RuntimeError("the scorer is broken")
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / max(1, len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    count: int = 20


class LuckySums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"{number}+1=", system_prompt="Add.", answer=str(number + 1)), self.config.task)
            for number in range(self.config.count)
        ]
