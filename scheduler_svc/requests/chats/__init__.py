"""Chats: their fields and checks, and their rendering with the model's template or another one."""
