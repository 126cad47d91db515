// Asking: one request for a chat completion, and the answer that it fills.

import type { Answer } from "./answer.ts";
import type { Server } from "./server.ts";

const TRACED = { stream: true, trace_rounds: true, return_token_ids: true };

/** Fill an answer. `grown`: called after each chunk. Stopping is no error; everything else that ends it early is. */
export async function ask(server: Server, body: object, answer: Answer, signal: AbortSignal, grown: () => void): Promise<void> {
  answer.begin(performance.now());
  try {
    for await (const chunk of server.chat({ ...body, ...TRACED }, signal)) {
      answer.take(chunk, performance.now());
      grown();
    }
    answer.end("complete", performance.now());
  } catch (error) {
    answer.end(signal.aborted ? "stopped" : "failed", performance.now());
    if (!signal.aborted) throw error;
  } finally {
    grown();
  }
}
