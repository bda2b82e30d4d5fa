"""The OpenAI HTTP surface over any backend: the engine, or the simulator in real time. Needs the extra ``serve``."""
