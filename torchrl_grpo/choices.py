"""What may be chosen, once for the parts that take it and for the config. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Literal

GENERATED = ("arithmetic", "countdown")
"""Built-in data sets that are generated."""
PRESETS = ("gsm8k", "math", "ifeval")
"""Built-in data sets that are files, or on the hub; any other name is a file, a folder or a data set on the hub."""
Backend = Literal["transformers", "vllm"]
"""Generation engines."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Types of weights."""
Precision = Literal["full", "bf16", "fp16"]
"""Autocast of the training step; ``full`` is none."""
InFlight = Literal["wait", "keep", "abort"]
"""What new weights do to sequences that are being sampled."""
WeightTransfer = Literal["auto", "object_store", "broadcast", "cuda_ipc"]
"""How weights reach engines in other processes."""

RatioLevel = Literal["token", "sequence", "sequence_token"]
"""What the importance ratio is taken over."""
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
"""How the objective is averaged over tokens."""
Proximal = Literal["behaviour", "recomputed", "interpolated"]
"""Policies that the ratio can be taken to."""
WeightBound = Literal["none", "truncate", "mask"]
"""How an importance weight is bounded."""
WeightLevel = Literal["token", "sequence"]
"""What an importance weight is taken over."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of the KL."""

AdvantageMean = Literal["group", "leave_one_out", "batch", "none"]
"""Baselines of the advantage."""
AdvantageStd = Literal["group", "batch", "none"]
"""Scales of the advantage."""
RewardCombination = Literal["sum", "gdpo"]
"""How the parts of a reward become an advantage."""
AdvantageLevel = Literal["sequence", "token"]
"""What has one advantage."""

Optimizer = Literal["adamw", "adamw_8bit"]
"""Optimizers."""
LearningRate = Literal["constant", "linear", "cosine"]
"""How the learning rate falls after its warm-up."""

ServiceMode = Literal["disabled", "offline", "online"]
"""What Weights & Biases or MLflow does."""
TrackioMode = Literal["disabled", "offline"]
"""What Trackio does."""
