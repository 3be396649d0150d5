# All that a run needs on CUDA: torch, vLLM and Ray. The host needs NVIDIA's driver and its container toolkit.
#
#     docker build --tag torchrl_grpo .
#     mkdir -p outputs
#     docker run --gpus all --ipc host --user "$(id -u):$(id -g)" --env HOME=/tmp \
#         --volume "$PWD/outputs:/app/outputs" torchrl_grpo python sota/grpo/grpo.py
FROM python:3.11-slim-bookworm

ENV PATH=/app/.venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Triton compiles kernels when a run starts, and NCCL finds InfiniBand and RoCE cards through the verbs libraries.
# Debian's newest versions, for their security updates.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ make ibverbs-providers libibverbs1 librdmacm1 && \
    rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 grpo && install --directory --owner grpo /app
USER 1000
WORKDIR /app
COPY --chown=1000 . .
# There is no nvcc, so FlashInfer's kernels, which vLLM samples with, come compiled.
RUN make install && pip install --requirement sota/grpo/requirements_gsm8k.txt && vllm download-kernels

CMD ["python", "sota/grpo/grpo.py", "--config-name", "grpo_arithmetic"]
