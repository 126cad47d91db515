// Figures of an answer: counts of its rounds, which the charts draw.

import { type Answer, type Origin, type Round, depthsOf } from "./answer.ts";

export const DRAFTED: readonly Origin[] = ["drafter", "lookup", "prediction"];
// The rate over time is that of so many rounds, or of so long, whichever is longer.
const WINDOW_ROUNDS = 8;
const WINDOW_MS = 1000;

export interface Share {
  accepted: number;
  drafted: number;
}

export interface Point {
  x: number;
  y: number;
}

export function tokenCount(answer: Answer): number {
  return answer.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
}

/** Tokens per second from the request to now or to the end, the prompt included. */
export function speed(answer: Answer, now: number): number {
  return (tokenCount(answer) / answer.elapsed(now)) * 1000;
}

export function tokensPerRound(answer: Answer): number {
  return tokenCount(answer) / answer.rounds.length;
}

/** What each origin drafted, and what of it was accepted. */
export function sharesByOrigin(rounds: readonly Round[]): Map<Origin, Share> {
  const shares = new Map<Origin, Share>(DRAFTED.map((origin) => [origin, { accepted: 0, drafted: 0 }]));
  for (const { draft } of rounds) {
    draft?.nodes.forEach((node, index) => {
      const share = shares.get(node.origin);
      if (!share) return;
      share.drafted += 1;
      share.accepted += Number(draft.accepted.includes(index));
    });
  }
  return shares;
}

/** For each depth, in how many of the rounds that drafted so deep a token was accepted there. Depth 1 comes first. */
export function acceptanceByDepth(rounds: readonly Round[]): Share[] {
  const shares: Share[] = [];
  for (const { draft } of rounds) {
    if (!draft) continue;
    const deepest = Math.max(...depthsOf(draft));
    for (let depth = 1; depth <= deepest; depth++) {
      const share = (shares[depth - 1] ??= { accepted: 0, drafted: 0 });
      share.drafted += 1;
      share.accepted += Number(depth < draft.accepted.length);
    }
  }
  return shares;
}

/** Tokens per second at the end of each round. x: seconds since the request. */
export function rates(rounds: readonly Round[]): Point[] {
  let first = 0; // of the window
  let inside = 0;
  return rounds.map(({ tokens, at }, index) => {
    inside += tokens.length;
    while (index - first >= WINDOW_ROUNDS && at - (rounds[first]?.at ?? at) >= WINDOW_MS) {
      inside -= rounds[first++]?.tokens.length ?? 0;
    }
    const since = rounds[first - 1]?.at ?? 0;
    return { x: at / 1000, y: (inside / Math.max(at - since, 1)) * 1000 };
  });
}

/** Tokens so far at the end of each round. x: seconds since the request. */
export function progress(rounds: readonly Round[]): Point[] {
  let sum = 0;
  return [{ x: 0, y: 0 }, ...rounds.map((round) => ({ x: round.at / 1000, y: (sum += round.tokens.length) }))];
}
