"""``python -m torchrl_grpo.samples``: works for one more release, use ``python -m torchrl_grpo samples``."""

from torchrl_grpo.extras.report.samples import main

if __name__ == "__main__":
    main()
