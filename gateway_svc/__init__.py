"""The HTTP gateway: OpenAI's and Anthropic's APIs in front of a scheduler, whose client it is.

It needs no model: text becomes token ids, and chats become prompts, on the scheduler. Several may serve one scheduler.
"""
