// What others think of an answer: the judge's grade and verdict, and the user's own vote, which can be changed for some time.

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

type Vote = { thumb: "positive" | "negative" | null; stars: number | null };

/** The two fields of a vote. A server before they were told apart shows one of them. */
export function voteOf(reward: Reward | null): Vote {
  if (!reward) return { thumb: null, stars: null };
  const thumb = reward.thumb === undefined && reward.stars === null ? reward.sentiment : reward.thumb;
  return { thumb: thumb ?? null, stars: reward.stars };
}

/** The vote after a thumb or a star was pressed: what is pressed again is withdrawn, and the other of the two stays. */
export function voted(before: Vote, pressed: Partial<Vote>): Vote {
  const thumb = pressed.thumb ? (pressed.thumb === before.thumb ? null : pressed.thumb) : before.thumb;
  const stars = pressed.stars ? (pressed.stars === before.stars ? null : pressed.stars) : before.stars;
  return { thumb, stars };
}

/** The vote as the server will show it; null when nothing is left of it. */
export function rewardOf({ thumb, stars }: Vote, comment: string | null = null): Reward | null {
  if (!thumb && !stars) return null;
  const reward = stars ? (stars - 3) / 2 : thumb === "positive" ? 1 : -1;
  const sentiment = reward > 0 ? "positive" : reward < 0 ? "negative" : (thumb ?? "positive");
  return { reward, sentiment, thumb, stars, comment };
}

/** A vote that stands as it is, in words; "" for none. */
export function inWords({ thumb, stars }: Vote): string {
  return [thumb && (thumb === "positive" ? "good answer" : "bad answer"), stars && `${stars} of 5 stars`].filter(Boolean).join(", ");
}

export function Rating({ turn, onVoted }: { turn: Turn; onVoted(reward: Reward | null): void }) {
  const [said, say] = useState("");
  const [sending, setSending] = useState(false);
  const vote = voteOf(turn.reward);
  const comment = turn.reward?.comment ?? null;
  const send = async (pressed: Partial<Vote>) => {
    if (sending) return;
    const next = voted(vote, pressed);
    const what = pressed.thumb ? "thumb" : "stars";
    setSending(true);
    try {
      if (next[what] === null) await call("DELETE", `feedback/${turn.queryId}?what=${what}`);
      else await call("POST", "feedback", { query_id: turn.queryId, ...(what === "thumb" ? { sentiment: next.thumb } : { stars: next.stars }), ...(comment ? { comment } : {}) });
      onVoted(rewardOf(next, comment));
      say(next[what] === null ? "Withdrawn" : "Thank you");
    } catch (error) {
      say(error instanceof Error ? error.message : String(error));
    } finally {
      setSending(false);
    }
  };
  const words = comment && <q className="dim" dir="auto">{comment}</q>;
  if (!turn.rateable) {
    const said = `Your vote: ${inWords(vote)}. The answer is too old for it to be changed.`;
    return inWords(vote) && (
      <span className="rating">
        <span role="img" aria-label={said} title={said}>
          {vote.thumb && <Icon name={vote.thumb === "positive" ? "up" : "down"} filled />}
          {vote.stars && <span className="stars">{[1, 2, 3, 4, 5].map((stars) => <span key={stars} className={stars <= vote.stars! ? "star on" : "star"}><Icon name="star" filled={stars <= vote.stars!} /></span>)}</span>}
        </span>
        {words}
      </span>
    );
  }
  return (
    <span className="rating" role="group" aria-label="Your vote">
      <IconButton icon="up" label="Good answer" aria-pressed={vote.thumb === "positive"} filled={vote.thumb === "positive"} onClick={() => void send({ thumb: "positive" })} />
      <IconButton icon="down" label="Bad answer" aria-pressed={vote.thumb === "negative"} filled={vote.thumb === "negative"} onClick={() => void send({ thumb: "negative" })} />
      <span className="stars">
        {[1, 2, 3, 4, 5].map((stars) => (
          <button key={stars} type="button" className={stars <= (vote.stars ?? 0) ? "star on" : "star"} aria-label={`${stars} of 5 stars`}
            title={`${stars} of 5 stars`} aria-pressed={vote.stars === stars} onClick={() => void send({ stars })}><Icon name="star" filled={stars <= (vote.stars ?? 0)} /></button>
        ))}
      </span>
      {words}
      <span className="dim" role="status">{said}</span>
    </span>
  );
}
