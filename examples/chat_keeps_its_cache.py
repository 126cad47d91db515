"""A conversation: earlier turns stay in the cache, so only what is new is read."""

import foreword

llm = foreword.load()
chat = llm.chat(system="You answer in one short sentence.", max_new_tokens=32)
for question in ("What is the capital of France?", "And of Italy?"):
    reply = chat.send(question)
    print(f"> {question}\n{reply.text}")
    print(f"  ({reply.stats.reused_tokens} of {reply.stats.prompt_tokens} prompt tokens were in the cache)")
