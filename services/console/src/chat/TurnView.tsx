import { memo, useEffect, useState } from "react";
import { Attachment } from "../FileViewer";
import { Prose } from "../markdown/Prose";
import { Icon } from "../ui/icons";
import { CopyButton } from "../ui/CopyButton";
import { IconButton, Menu } from "../ui/parts";
import type { Conversation, TurnStore } from "./conversation";
import { Badges, Rating, Words } from "./Judging";
import { SafeLink, Steps, host } from "./Steps";
import { useStore } from "./store";
import { answerOf, finishOf, isOver, modelOf, sources, stepsOf, trailOf, usageOf, type Turn } from "./turn";
import { counted } from "../words";

export interface TurnActions {
  edit(turn: Turn): void;
  again(turn: Turn): void;
  choose(store: TurnStore): void;
  againWith(turn: Turn): void;
  stop(turn: Turn): void;
  waterfall(turn: Turn): void;
}

interface TurnViewProps {
  store: TurnStore;
  conversation: Conversation;
  actions: TurnActions;
  developer: boolean;
  window: number;
}

// A turn that only flies by while somebody scrolls is not asked for, and has nothing to press. In ms.
const LOOKED_AT = 250;

/** A turn on the page: the question, what happened, the answer, and what can be done with it. */
export const TurnView = memo(function TurnView({ store, conversation, actions, developer, window }: TurnViewProps) {
  useStore(store);
  const [judged, setJudged] = useState(false);
  const { turn } = store;
  const over = isOver(turn);
  const text = answerOf(turn);
  const trail = developer ? trailOf(turn) : [];
  const [looked, look] = useState(!over);
  useEffect(() => {
    if (!over) return undefined;
    const timer = setTimeout(() => {
      look(true);
      conversation.detail(store);
    }, LOOKED_AT);
    return () => clearTimeout(timer);
  }, [over, conversation, store]);
  const found = over ? sources(turn) : [];
  const refused = turn.state === "failed" || (turn.state === "cancelled" && !text);
  return (
    <article className={over ? "turn" : "turn running"} aria-label="Question and answer" aria-busy={!over}>
      <div className="question-row">
        {turn.files.length > 0 && <ul className="attached" aria-label="Files of the question">{turn.files.map((file) => <Attachment key={file.id} file={file} />)}</ul>}
        {turn.query && <div className="question" dir="auto">{turn.query}</div>}
        <div className="question-actions">
          {looked && (
            <>
              {turn.query && <CopyButton text={turn.query} label="Copy the question" />}
              <IconButton icon="edit" label="Edit and ask again" onClick={() => actions.edit(turn)} />
            </>
          )}
        </div>
      </div>
      <div className="steps"><Steps steps={stepsOf(turn)} over={over} answering={text !== ""} /></div>
      {text && <Prose text={text} over={over} />}
      {!over && (
        <p className="working">
          <span className="pulse" aria-hidden="true" /> {turn.state === "queued" ? "Waiting for its turn" : developer ? (trail.at(-1) ?? "claimed") : text ? "Writing" : "Working"}
          <button type="button" className="quiet" onClick={() => actions.stop(turn)}><Icon name="stop" /> Stop</button>
        </p>
      )}
      {turn.state === "failed" && <p className="error-text" role="alert">This question was not answered: {turn.error?.message} <span className="dim">({turn.error?.code})</span></p>}
      {(turn.state === "cancelled" || turn.interrupted) && <p className="note">Stopped before the end.</p>}
      {found.length > 0 && (
        <ol className="sources" aria-label="Sources">
          {found.map((source) => <li key={source.url}><SafeLink address={source.url}>{source.title}</SafeLink> <span className="dim">{host(source.url)}</span></li>)}
        </ol>
      )}
      {over && (
        <footer className="turn-foot">
          {looked && (
            <>
              {text && <CopyButton text={text} label="Copy the answer" />}
              {refused
                ? <button type="button" className="quiet" onClick={() => actions.again(turn)}><Icon name="again" /> Try again</button>
                : <Menu label="Ask again" icon="again" choices={[
                  { name: "The same again", icon: "again", act: () => actions.again(turn) },
                  { name: "With another model or settings …", icon: "tune", act: () => actions.againWith(turn) },
                ]} />}
              {turn.queryId && turn.state !== "failed" && <Rating turn={turn} onVoted={(reward) => conversation.voted(turn.queryId!, reward, true)} />}
              <Badges turn={turn} open={judged} onToggle={() => setJudged(!judged)} />
              <button type="button" className="quiet details-line" onClick={() => actions.waterfall(turn)}>{summary(turn, window) || "Details"}</button>
            </>
          )}
        </footer>
      )}
      {judged && <Words turn={turn} />}
      {trail.length > 0 && <p className="trail" aria-label="State machine">{trail.join(" → ")}</p>}
    </article>
  );
});

function summary(turn: Turn, window: number): string {
  const { prompt_tokens: prompt = 0, completion_tokens: completion = 0 } = usageOf(turn);
  const share = window && prompt ? Math.round((100 * Math.min(window, prompt + completion)) / window) : 0;
  return [
    modelOf(turn),
    prompt || completion ? counted(prompt + completion, "token") : "",
    share > 0 ? `${share} % of the window` : "",
    finishOf(turn) === "length" ? "cut at the length limit" : "",
    turn.detail === "expired" ? "its steps were not kept" : "",
  ].filter(Boolean).join(" · ");
}
