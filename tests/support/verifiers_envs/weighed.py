"""An environment of verifiers with a tool, which a server of its own runs, or one at ``taskset.task.scales.url``."""

import verifiers.v1 as vf

__all__ = ["Weighed"]


class Scales(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def weigh(self, thing: str) -> str:
        """Weigh a thing."""
        return f"{len(thing)} kg"


class WeighConfig(vf.TaskConfig):
    scales: vf.ToolsetConfig = vf.ToolsetConfig()


class WeighTask(vf.Task[vf.TaskData, vf.State, WeighConfig]):
    @classmethod
    def toolsets(cls, config: WeighConfig) -> list[vf.Toolset]:
        return [Scales(config.scales)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "4 kg")


class WeighedConfig(vf.TasksetConfig):
    task: WeighConfig = WeighConfig()


class Weighed(vf.Taskset[WeighTask, WeighedConfig]):
    def load(self) -> list[WeighTask]:
        return [
            WeighTask(vf.TaskData(prompt=f"Weigh a bear, {number}."), self.config.task)
            for number in range(10)
        ]


if __name__ == "__main__":
    Scales.run()
