"""Chats as tokens."""
