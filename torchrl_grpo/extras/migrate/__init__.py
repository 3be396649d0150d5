"""Migration: translates configs of TRL, verl, AReaL, prime-rl and TorchRL's GRPO script into ours.

``readers`` and ``scripts`` turn a file into flat settings, the ``.toml`` files define the
equivalent of each key, ``translation`` and ``sizes`` apply them, and ``command`` prints. No file is
ever run.
"""
