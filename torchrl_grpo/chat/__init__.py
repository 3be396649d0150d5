"""Chats as tokens: what a chat template writes, and what others wrote into it."""
