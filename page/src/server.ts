// The server: requests, streams of chunks, and its errors in plain words.

import type { Chunk } from "./answer.ts";

export interface Methods {
  method: string;
  methods: string[];
  switchable: boolean;
}

/** An error to show. `aboutKey`: the API key is missing or wrong. */
export class Problem extends Error {
  constructor(
    message: string,
    readonly aboutKey = false,
  ) {
    super(message);
  }
}

export class Server {
  key = "";

  async methods(): Promise<Methods> {
    return (await (await this.#ask("foreword/methods")).json()) as Methods;
  }

  async useMethod(method: string): Promise<Methods> {
    return (await (await this.#ask("foreword/method", { method })).json()) as Methods;
  }

  async model(): Promise<string> {
    const listed = (await (await this.#ask("v1/models")).json()) as { data: { id: string }[] };
    return listed.data[0]?.id ?? "";
  }

  /** Yield the chunks of a chat completion. */
  async *chat(body: object, signal: AbortSignal): AsyncGenerator<Chunk> {
    const answer = await this.#ask("v1/chat/completions", body, signal);
    if (!answer.body) throw new Problem("The server sent no answer.");
    for await (const data of eventsOf(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new Problem(`The answer broke off: ${chunk.error.message}.`);
      yield chunk;
    }
    throw new Problem("The answer broke off: the connection to the server was closed.");
  }

  async #ask(path: string, body?: object, signal?: AbortSignal): Promise<Response> {
    if (/[^\x21-\x7e]/.test(this.key)) throw new Problem("The API key has a character that no key has. Correct it in the settings.", true);
    const headers: Record<string, string> = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const options: RequestInit = { headers, method: body ? "POST" : "GET" };
    if (body) options.body = JSON.stringify(body);
    if (signal) options.signal = signal;
    let answer: Response;
    try {
      answer = await fetch(path, options);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Problem("The server cannot be reached. Is it still running?");
    }
    if (!answer.ok) throw await this.#problem(answer);
    return answer;
  }

  async #problem(answer: Response): Promise<Problem> {
    const body = (await answer.json().catch(() => ({}))) as { error?: { message?: string } };
    const said = body.error?.message ?? answer.statusText;
    const wait = Number(answer.headers.get("Retry-After"));
    const again = wait ? ` Try again in ${wait} s.` : "";
    switch (answer.status) {
      case 401:
        return this.key
          ? new Problem("The server does not know this API key. Correct it in the settings.", true)
          : new Problem("This server needs an API key. Enter it in the settings.", true);
      case 429:
        return new Problem(`The server is busy, and its queue is full.${again}`);
      case 503:
        return new Problem(`The server cannot answer now: ${said}.${again}`);
      case 500:
        return new Problem(`The server failed: ${said}.`);
      default:
        return new Problem(`The server refused the request: ${said}.`);
    }
  }
}

/** Yield the data of server-sent events. */
async function* eventsOf(body: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (text + value).split("\n\n");
      text = events.pop() ?? "";
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
