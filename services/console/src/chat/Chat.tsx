// The place of conversations: the list of turns, the field below it, and what belongs to one chat.

import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import { Virtualizer, type VirtualizerHandle } from "virtua";
import type { Readiness } from "../api/types";
import { Icon } from "../ui/icons";
import { ChatSettingsDialog, USUAL, asked, fromServer, keepNewSettings, newSettings, toServer, type ChatSettings } from "./ChatSettings";
import { Composer, type ComposerHandle } from "./Composer";
import { ConversationState } from "./ConversationState";
import type { Conversation, TurnStore } from "./conversation";
import { useStore } from "./store";
import { TurnView, type TurnActions } from "./TurnView";
import { usageOf, type Turn } from "./turn";
import { rows, type Row } from "./versions";
import { Waterfall } from "./Waterfall";
import { counted } from "../words";

const NEAR_END = 80;
const NEAR_START = 400;

interface ChatProps {
  conversation: Conversation;
  ready: Readiness | null;
  developer: boolean;
  composer: React.Ref<ComposerHandle>;
  onError(error: unknown): void;
}

export function Chat({ conversation, ready, developer, composer, onError }: ChatProps) {
  useStore(conversation);
  const id = conversation.sessionId;
  const [fresh, setFresh] = useState(newSettings);
  const kept = conversation.settings;
  const settings = useMemo(() => (id === null ? fresh : kept ? fromServer(kept) : USUAL), [id, fresh, kept]);
  const [editing, setEditing] = useState<Turn | null>(null);
  const [options, setOptions] = useState<"" | "chat" | "again">("");
  const [chosen, choose] = useState<Turn | null>(null);
  const [looked, look] = useState<Turn | null>(null);
  const [state, showState] = useState(false);
  const field = useRef<ComposerHandle>(null);
  const model = ready?.parts["model"];
  const window = Number(model?.facts?.["window"]) || 0;
  useEffect(() => setEditing(null), [id]);
  useLayoutEffect(() => {
    if (typeof composer === "function") composer(field.current);
    else if (composer) composer.current = field.current;
  });

  const change = useCallback((next: ChatSettings) => {
    if (conversation.sessionId !== null) return void conversation.set(toServer(next)).catch(onError);
    setFresh(next);
    keepNewSettings(next);
  }, [conversation, onError]);
  const ask = useCallback(async (query: Parameters<Conversation["ask"]>[0], own = settings, insteadOf: Turn | null = null) => {
    const before = conversation.sessionId;
    await conversation.ask(asked(query, own), insteadOf);
    if (before === null) await conversation.set(toServer(own));
  }, [conversation, settings]);

  const again = useCallback(
    async (turn: Turn, own = settings) => ask({ query: turn.query, files: await conversation.filesOf(turn) }, own, turn), [ask, conversation, settings],
  );

  const actions = useMemo<TurnActions>(() => ({
    edit: (turn) => void conversation.filesOf(turn).then((files) => { setEditing(turn); field.current?.put(turn.query, files); }, onError),
    again: (turn) => void again(turn).catch(onError),
    choose: (store) => void conversation.choose(store).catch(onError),
    againWith: (turn) => { choose(turn); setOptions("again"); },
    stop: (turn) => void conversation.cancel(turn).catch(onError),
    waterfall: look,
  }), [again, conversation, onError]);

  const open = conversation.open;
  const empty = !conversation.turns.length && !conversation.loading;
  return (
    <main className="chat">
      <h1 className="hidden-text">{conversation.title || "New chat"}</h1>
      {empty ? <First ready={ready} onAsk={(query) => void ask({ query }).catch(onError)} /> : (
        <Turns key={id === null ? "new" : "kept"} conversation={conversation} actions={actions} developer={developer} window={window} />
      )}
      <div className="below">
        {conversation.connection && <p className="connection" role="status">{conversation.connection}</p>}
        <Gauge conversation={conversation} window={window} />
        {editing && (
          <p className="note editing" role="status">
            Asked in other words, this question and what came after it are forgotten. <button type="button" className="quiet" onClick={() => { setEditing(null); field.current?.put(""); }}>Leave it as it was</button>
          </p>
        )}
        <Composer
          key={id ?? "new"} ref={field} sessionId={id} settings={settings} waiting={open.length}
          onAsk={async (query) => { await ask(query, undefined, editing); setEditing(null); }}
          onStop={() => { for (const turn of [...open].reverse()) void conversation.cancel(turn).catch(onError); }}
          onSettings={(some) => change({ ...settings, ...some })}
          onOptions={() => setOptions("chat")} onState={id === null ? null : () => showState(true)} onError={onError}
        />
      </div>
      <ChatSettingsDialog
        open={options !== ""} settings={settings} usual={model?.model ?? ""} action={options === "again" ? "Ask again" : "Done"} onClose={() => setOptions("")}
        onDone={(next) => {
          if (options === "again" && chosen) void again(chosen, next).catch(onError);
          else change(next);
        }}
      />
      {id !== null && <ConversationState key={id} open={state} sessionId={id} onClose={() => showState(false)}
        state={`${conversation.chosen} ${JSON.stringify(kept)} ${conversation.turns.map(({ turn }) => `${turn.queryId}${turn.state}`).join(" ")}`} />}
      <Waterfall sessionId={id} turn={looked} onClose={() => look(null)} />
    </main>
  );
}

function Turns({ conversation, actions, developer, window }: { conversation: Conversation; actions: TurnActions; developer: boolean; window: number }) {
  const scroller = useRef<HTMLDivElement>(null);
  const lane = useRef<HTMLDivElement>(null);
  const list = useRef<VirtualizerHandle>(null);
  const atEnd = useRef(true);
  const [away, setAway] = useState(false);
  const count = conversation.turns.length;
  const last = conversation.turns.at(-1);
  const groups = rows(conversation.turns, conversation.chosen);

  // what is written at the end stays in sight as long as nobody has scrolled away from it
  useEffect(() => {
    const element = scroller.current!;
    const keep = () => { if (atEnd.current) element.scrollTop = element.scrollHeight; };
    const observer = new ResizeObserver(keep);
    observer.observe(lane.current!);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  // one's own question is always shown
  const own = last?.turn.queryId === "";
  useLayoutEffect(() => {
    if (!own) return;
    atEnd.current = true;
    scroller.current!.scrollTop = scroller.current!.scrollHeight;
  }, [own, count]);

  const toEnd = () => {
    atEnd.current = true;
    list.current?.scrollToIndex(groups.length - 1, { align: "end" });
    scroller.current!.scrollTop = scroller.current!.scrollHeight;
  };
  return (
    <>
      <div
        ref={scroller} className="scroller" tabIndex={0} role="region" aria-label="Conversation"
        onScroll={(event) => {
          const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
          atEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
          setAway(!atEnd.current);
          if (scrollTop < NEAR_START && !atEnd.current) void conversation.showEarlier().catch(() => {});
        }}
      >
        <div ref={lane} className="lane">
          {conversation.earlier && <button type="button" className="earlier quiet" onClick={() => void conversation.showEarlier().catch(() => {})}>Earlier turns</button>}
          <Virtualizer ref={list} scrollRef={scroller} shift={conversation.shifted} startMargin={conversation.earlier ? 44 : 0} bufferSize={200} keepMounted={groups.length ? [groups.length - 1] : []}>
            {groups.map((row) => <Versions key={row.versions[0]!.key} row={row} conversation={conversation} actions={actions} developer={developer} window={window} />)}
          </Virtualizer>
        </div>
      </div>
      {away && <button type="button" className="jump" onClick={toEnd} aria-label="To the newest"><Icon name="arrow" /></button>}
    </>
  );
}

interface VersionsProps {
  row: Row<TurnStore>;
  conversation: Conversation;
  actions: TurnActions;
  developer: boolean;
  window: number;
}

/** The answers to a question that was asked again: one, with what came behind it, and a way to the others; or all side
    by side. */
function Versions({ row: { versions, at }, ...rest }: VersionsProps) {
  const [beside, setBeside] = useState(false);
  const count = versions.length;
  const shown = versions[at]!;
  const choose = (place: number) => rest.actions.choose(versions[place]!);
  if (count === 1) return <TurnView store={shown} {...rest} />;
  return (
    <div className="versions">
      <div className="version-choice" role="group" aria-label="Versions of the answer">
        <button type="button" className="quiet" aria-label="The version before" disabled={at <= 0 || beside} onClick={() => choose(at - 1)}>‹</button>
        <span>{beside ? `${count} versions` : `${at + 1} of ${count}`}</span>
        <button type="button" className="quiet" aria-label="The version after" disabled={at >= count - 1 || beside} onClick={() => choose(at + 1)}>›</button>
        <button type="button" className="quiet" aria-pressed={beside} onClick={() => setBeside(!beside)}>Side by side</button>
      </div>
      {beside
        ? <div className="beside" tabIndex={0} role="region" aria-label="Versions side by side">{versions.map((store) => <TurnView key={store.key} store={store} {...rest} />)}</div>
        : <TurnView key={shown.key} store={shown} {...rest} />}
    </div>
  );
}

/** How full the model's window is. */
function Gauge({ conversation, window }: { conversation: Conversation; window: number }) {
  const usage = conversation.turns.map(({ turn }) => usageOf(turn)).findLast(({ prompt_tokens = 0 }) => prompt_tokens > 0);
  if (!window || !usage) return null;
  const used = (usage.prompt_tokens ?? 0) + (usage.completion_tokens ?? 0);
  const share = Math.min(100, Math.round((100 * used) / window));
  if (share < 20) return null;
  return (
    <p className="gauge dim" title={`${used.toLocaleString("en")} of ${counted(window, "token")}. The oldest turns are left out of what the model sees when it is full; you can still read them.`}>
      <meter min="0" max="100" high={80} value={share} aria-label="How full the model's window is" /> {share} % of what the model can see at once
    </p>
  );
}

const EXAMPLES = [
  "What is the capital of France, and what is it known for?",
  "Please remember that my preferred language is Elixir.",
  "What major AI news broke this week?",
];

const HELP: Record<string, string> = {
  model: "Start Ollama (ollama serve) and pull a model, or name another server with LOCAL2_BACKEND and LOCAL2_BASE_URL.",
  generator: "Nobody is there to answer yet. If this stays, look at the log of local2 run.",
  memory: "Answers come without memories until it is there. local2 doctor says what is wrong with it.",
  tools: "Some tools are not there. local2 doctor says which, and why.",
  bus: "Redis does not answer. The page goes on by itself when it is back.",
  gateway: "The gateway does not answer. The page goes on by itself when it is back.",
};

function First({ ready, onAsk }: { ready: Readiness | null; onAsk(query: string): void }) {
  const missing = Object.entries(ready?.parts ?? {}).filter(([, part]) => !part.ok);
  const model = ready?.parts["model"];
  const demo = model?.demo;
  // a GPU that the model does not use, with the line that mends it
  const note = demo ? "" : model?.note;
  return (
    <div className="first">
      <h2>What would you like to know?</h2>
      <p className="dim">Everything stays on your own machines. Thinking, tools and memories are shown while they happen.</p>
      <div className="examples">{EXAMPLES.map((query) => <button key={query} type="button" onClick={() => onAsk(query)}>{query}</button>)}</div>
      {(missing.length > 0 || demo || note) && (
        <section className="missing" aria-label="What is missing">
          <h3>What is missing</h3>
          <ul>
            {note && <li><b>Speed.</b> {note}</li>}
            {demo && <li><b>A real model.</b> The small demonstration model answers: it proves that everything works, and knows little. {HELP["model"]}</li>}
            {missing.map(([name, part]) => <li key={name}><b>{name}</b>: {part.reason}. {HELP[name]}</li>)}
          </ul>
        </section>
      )}
    </div>
  );
}
