"""An HTTP server in the manner of OpenAI's API around one engine: `python -m examples.openai_server`."""
