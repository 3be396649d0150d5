"""``python -m torchrl_grpo.sweep``: works for one more release, use ``python -m torchrl_grpo sweep``."""

from torchrl_grpo.extras.report.sweep import main

if __name__ == "__main__":
    main()
