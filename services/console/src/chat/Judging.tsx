// What others think of an answer: the judge's grade and verdict, and the user's own vote, which can be changed.

import { useState } from "react";
import { call } from "../api/http";
import type { Reward } from "../api/types";
import { IconButton, colourOf, verdictOf } from "../ui/parts";
import { Icon } from "../ui/icons";
import type { Turn } from "./turn";

export function Badges({ turn, open, onToggle }: { turn: Turn; open: boolean; onToggle(): void }) {
  const { critique, pairwise } = turn;
  const colour = colourOf(critique?.score);
  return (
    <>
      {colour && (
        <button type="button" className={`badge ${colour}`} aria-expanded={open} title={critique!.feedback} onClick={onToggle}
          aria-label={`${critique!.score}/5: the critic's score. ${critique!.feedback}`}>{critique!.score}/5</button>
      )}
      {pairwise && (
        <button type="button" className="badge verdict" aria-expanded={open} title={pairwise.reason} onClick={onToggle}
          aria-label={`${verdictOf(pairwise.winner)}: compared with the second respondent's answer. ${pairwise.reason}`}>{verdictOf(pairwise.winner)}</button>
      )}
    </>
  );
}

export function Words({ turn }: { turn: Turn }) {
  const { critique, pairwise } = turn;
  return (
    <div className="critique">
      {critique && <p dir="auto">{critique.feedback} <span className="dim">rubric: {critique.rubric}</span></p>}
      {pairwise && (
        <p dir="auto"><b>Compared:</b> {verdictOf(pairwise.winner)}
          {pairwise.score_a !== null && pairwise.score_b !== null ? ` (${pairwise.score_a} and ${pairwise.score_b} of 5)` : ""}. {pairwise.reason}</p>
      )}
    </div>
  );
}

type Vote = { sentiment: "positive" | "negative"; stars: number | null };

/** The vote after a thumb or a number of stars was pressed: the other of the two stays where both can be meant. */
export function voted(before: Vote | null, pressed: { sentiment: Vote["sentiment"] } | { stars: number }): Vote {
  if ("stars" in pressed) {
    const { stars } = pressed;
    return { stars, sentiment: stars === 3 ? (before?.sentiment ?? "positive") : stars > 3 ? "positive" : "negative" };
  }
  const stars = before?.stars ?? null;
  const fits = stars === 3 || (stars !== null && stars > 3 === (pressed.sentiment === "positive"));
  return { sentiment: pressed.sentiment, stars: fits ? stars : null };
}

export function Rating({ turn, onVoted }: { turn: Turn; onVoted(reward: Reward): void }) {
  const [said, say] = useState("");
  const vote: Vote | null = turn.reward ? { sentiment: turn.reward.sentiment, stars: turn.reward.stars } : null;
  const send = async (pressed: Parameters<typeof voted>[1]) => {
    const next = voted(vote, pressed);
    try {
      await call("POST", "feedback", { query_id: turn.queryId, sentiment: next.sentiment, ...(next.stars ? { stars: next.stars } : {}) });
      onVoted({ reward: next.sentiment === "positive" ? 1 : -1, sentiment: next.sentiment, stars: next.stars, comment: null });
      say("Thank you");
    } catch (error) {
      say(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <span className="rating" role="group" aria-label="Your vote">
      <IconButton icon="up" label="Good answer" aria-pressed={vote?.sentiment === "positive"} filled={vote?.sentiment === "positive"} onClick={() => void send({ sentiment: "positive" })} />
      <IconButton icon="down" label="Bad answer" aria-pressed={vote?.sentiment === "negative"} filled={vote?.sentiment === "negative"} onClick={() => void send({ sentiment: "negative" })} />
      <span className="stars">
        {[1, 2, 3, 4, 5].map((stars) => (
          <button key={stars} type="button" className={stars <= (vote?.stars ?? 0) ? "star on" : "star"} aria-label={`${stars} of 5 stars`}
            title={`${stars} of 5 stars`} aria-pressed={vote?.stars === stars} onClick={() => void send({ stars })}><Icon name="star" filled={stars <= (vote?.stars ?? 0)} /></button>
        ))}
      </span>
      <span className="dim" role="status">{said}</span>
    </span>
  );
}
