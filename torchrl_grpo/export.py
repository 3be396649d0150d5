"""``python -m torchrl_grpo.export``."""

from torchrl_grpo.scripts.export import main

if __name__ == "__main__":
    main()
