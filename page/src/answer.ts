// An answer as it grows: chunks of a stream -> rounds, and pieces of text with the tokens that they come from.

export type Origin = "root" | "drafter" | "lookup" | "prediction";

/** A node of a draft tree. `parent` is its place in the list; the root is its own. `probability`: under the model. */
export interface DraftNode {
  token: number;
  text: string;
  parent: number;
  origin: Origin;
  probability: number | null;
}

/** What a round drafted. `accepted`: the path of nodes, the root first. `next`: the model's own token after it. */
export interface Draft {
  nodes: DraftNode[];
  accepted: number[];
  next: { token: number; text: string };
}

/** A decided token. `depth`: in the draft tree; the model's own token has none. */
export interface Token {
  text: string;
  round: number;
  origin: Origin | "model";
  depth: number | null;
  probability: number | null;
}

export interface Round {
  number: number; // from 1
  draft: Draft | null;
  tokens: Token[];
  at: number; // ms since the request was sent
}

/** Text and its tokens: one, unless several make up a character. */
export interface Piece {
  text: string;
  tokens: Token[];
}

/** What a chunk of /v1/chat/completions holds, as far as it is read here. */
export interface Chunk {
  error?: { message: string };
  choices?: { delta: { content?: string }; finish_reason: string | null; token_ids?: number[] }[];
  foreword?: { tokens: number[]; round: Draft | null };
}

export type State = "waiting" | "running" | "complete" | "stopped" | "failed";

export class Answer {
  readonly rounds: Round[] = [];
  readonly pieces: Piece[] = [];
  readonly ids: number[] = [];
  state: State = "waiting";
  text = "";
  reason = ""; // why it ended, in the server's word
  #began = 0;
  #ended: number | null = null;
  #unplaced: Token[] = []; // tokens whose text has not come yet
  #unread = ""; // text whose tokens are not known yet

  begin(now: number): void {
    this.state = "running";
    this.#began = now;
  }

  /** Milliseconds from the request to now, or to the end. */
  elapsed(now: number): number {
    return this.state === "waiting" ? 0 : (this.#ended ?? now) - this.#began;
  }

  take(chunk: Chunk, now: number): void {
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (chunk.foreword) this.#addRound(chunk.foreword.tokens, chunk.foreword.round, now);
    this.ids.push(...(choice.token_ids ?? []));
    this.text += choice.delta.content ?? "";
    this.#unread += choice.delta.content ?? "";
    this.#place();
    this.reason = choice.finish_reason ?? this.reason;
  }

  end(state: State, now: number): void {
    this.state = state;
    this.#ended = now;
    if (this.#unread) this.#put(this.#unread, this.#unplaced.splice(0));
  }

  #addRound(decided: number[], draft: Draft | null, now: number): void {
    const number = this.rounds.length + 1;
    const tokens = decided.map((_, index) => tokenOf(draft, index, number));
    this.rounds.push({ number, draft, tokens, at: now - this.#began });
    this.#unplaced.push(...tokens);
  }

  /** Divide new text among tokens. A token may be a part of a character: then the text belongs to all that wait. */
  #place(): void {
    while (this.#unread) {
      const token = this.#unplaced[0];
      if (token?.text && this.#unread.startsWith(token.text)) {
        this.#put(token.text, this.#unplaced.splice(0, 1));
      } else if (token?.text.startsWith(this.#unread)) {
        return; // the rest of this token's text is still held back
      } else {
        this.#put(this.#unread, this.#unplaced.splice(0));
      }
    }
  }

  #put(text: string, tokens: Token[]): void {
    this.pieces.push({ text, tokens });
    this.#unread = this.#unread.slice(text.length);
  }
}

function tokenOf(draft: Draft | null, index: number, round: number): Token {
  const node = draft?.nodes[draft.accepted[index + 1] ?? -1];
  if (node) return { ...node, round, depth: index + 1 };
  return { text: draft?.next.text ?? "", round, origin: "model", depth: null, probability: null };
}

/** Return the depth of every node. */
export function depthsOf(draft: Draft): number[] {
  const depths: number[] = [];
  draft.nodes.forEach((node, index) => depths.push(index === 0 ? 0 : (depths[node.parent] ?? 0) + 1));
  return depths;
}
