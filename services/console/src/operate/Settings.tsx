// A participant's run-time settings, as a form that is made from their schema.

import { useCallback, useEffect, useMemo, useState } from "react";
import { call } from "../api/http";
import { trouble, useTail, type Shapes } from "./asking";
import { blamed, changes, fieldsOf, same, written, type Draft, type Field } from "./form";
import { Note, Waiting, When } from "./parts";
import { beginning, timeOf } from "./summary";
import { counted } from "../words";

type Shown = Shapes["SettingsShown"];

export function Settings({ participant }: { participant: string }) {
  const path = `participants/${encodeURIComponent(participant)}/settings`;
  const [shown, setShown] = useState<Shown | null>(null);
  const [draft, setDraft] = useState<Draft>({});
  const [refused, refuse] = useState<Record<string, string>>({});
  const [said, say] = useState("");
  const [onlyChanged, setOnlyChanged] = useState(false);
  const [words, setWords] = useState("");
  const load = useCallback(() => {
    call<Shown>("GET", path).then((found) => { setShown(found); setDraft({}); refuse({}); say(""); }, (error: unknown) => say(trouble(error)));
  }, [path]);
  useEffect(load, [load]);
  const fields = useMemo(() => (shown ? fieldsOf(shown.schema, shown.values) : []), [shown]);
  const { values, wrong } = changes(fields, draft);
  const count = Object.keys(values).length;
  const differs = (field: Field) => !same(field.value, field.default);
  const visible = fields.filter((field) => (!onlyChanged || differs(field) || draft[field.id] !== undefined) && `${field.id} ${field.description}`.toLowerCase().includes(words.toLowerCase()));

  const send = async (sent: Record<string, unknown>) => {
    try {
      setShown(await call<Shown>("PATCH", path, sent));
      setDraft({});
      refuse({});
      say("Kept: it holds in all replicas now, and for later starts.");
    } catch (error) {
      const words = trouble(error);
      const place = blamed(fields, words);
      refuse(place ? { [place]: words } : {});
      say(place ? "Nothing was changed: see below." : words);
      if (place) document.getElementById(`setting-${place}`)?.focus();
    }
  };
  const reset = (field: Field) => {
    const { values: back } = changes(fields, { [field.id]: written(field, field.default) });
    void send(back);
  };

  if (!shown) return said ? <Note>{said}</Note> : <Waiting />;
  return (
    <form className="settings" noValidate onSubmit={(event) => {
      event.preventDefault();
      refuse({});
      const first = Object.keys(wrong)[0];
      if (first) document.getElementById(`setting-${first}`)?.focus();
      else if (count) void send(values);
    }}>
      <div className="grid-tools">
        <label htmlFor="settings-words" className="hidden-text">Filter settings</label>
        <input id="settings-words" type="search" placeholder="Filter" value={words} onChange={(event) => setWords(event.target.value)} autoComplete="off" />
        <label className="check"><input type="checkbox" checked={onlyChanged} onChange={(event) => setOnlyChanged(event.target.checked)} /> Only what differs from the default ({fields.filter(differs).length})</label>
      </div>
      <p className="dim" role="status">{said || (fields.length ? "" : "It has no settings that can be changed while it runs.")}</p>
      {visible.map((field) => (
        <Setting key={field.id} field={field} words={draft[field.id] ?? written(field, field.value)} wrong={wrong[field.id] ?? refused[field.id] ?? ""} differs={differs(field)} kept={shown.kept?.includes(field.path[0]) ?? false}
          onChange={(typed) => setDraft((before) => ({ ...before, [field.id]: typed }))} onReset={() => reset(field)} />
      ))}
      <History participant={participant} />
      {(count > 0 || Object.keys(wrong).length > 0) && (
        <div className="settings-foot">
          <span>{Object.keys(wrong).length ? "Some values cannot be kept." : `${counted(count, "setting")} ${count === 1 ? "is" : "are"} changed.`}</span>
          <button type="button" className="quiet" onClick={() => { setDraft({}); refuse({}); }}>Take it back</button>
          <button type="submit" className="primary">Keep</button>
        </div>
      )}
    </form>
  );
}

const CHANGES = ["settings.update"];

/** What was changed while it ran, the newest first, as far back as the bus keeps it. */
function History({ participant }: { participant: string }) {
  const { entries } = useTail(CHANGES, 200);
  const own = entries.flatMap((entry) => {
    const payload = entry.payload as { participant?: unknown; values?: Record<string, unknown> } | null;
    return payload?.participant === participant ? [{ entry, values: Object.entries(payload.values ?? {}) }] : [];
  });
  if (!own.length) return null;
  return (
    <details className="history">
      <summary>Changed lately ({own.length})</summary>
      <ol>{own.map(({ entry, values }) => <li key={entry.entry_id}><When ms={timeOf(entry)} /> {values.map(([name, value]) => <span key={name} dir="auto"><b>{name}</b> = <code>{beginning(JSON.stringify(value), 80)}</code> </span>)}</li>)}</ol>
    </details>
  );
}

interface SettingProps {
  field: Field;
  words: string | boolean;
  wrong: string;
  differs: boolean;
  kept: boolean;
  onChange(words: string | boolean): void;
  onReset(): void;
}

function Setting({ field, words, wrong, differs, kept, onChange, onReset }: SettingProps) {
  const id = `setting-${field.id}`;
  const described = `${id}-about${wrong ? ` ${id}-wrong` : ""}`;
  const common = { id, "aria-describedby": described, "aria-invalid": Boolean(wrong) };
  const text = String(words);
  const preset = written(field, field.default);
  const long = field.kind === "json" || (field.kind === "text" && (text.length > 80 || text.includes("\n")));
  return (
    <div className={differs ? "setting differs" : "setting"}>
      <label htmlFor={id}>{field.path.map((part) => part.replaceAll("_", " ")).join(" · ")}</label>
      <div className="setting-field">
        {field.kind === "switch" ? <input {...common} type="checkbox" role="switch" checked={words === true} onChange={(event) => onChange(event.target.checked)} />
          : field.kind === "choice" ? <select {...common} value={text} onChange={(event) => onChange(event.target.value)}>{field.optional && <option value="">(none)</option>}{field.choices.map((one) => <option key={one}>{one}</option>)}</select>
            : long ? <textarea {...common} rows={Math.min(12, Math.max(3, text.split("\n").length))} spellCheck={false} value={text} onChange={(event) => onChange(event.target.value)} dir="auto" />
              : <input {...common} type="text" inputMode={field.kind === "number" ? "decimal" : undefined} placeholder={field.optional ? "unset" : undefined} spellCheck={false} autoComplete="off" value={text} onChange={(event) => onChange(event.target.value)} dir="auto" />}
        {differs && <button type="button" className="tool" onClick={onReset} aria-label={`Reset ${field.id} to its default`}>Reset</button>}
      </div>
      {wrong && <p className="error-text" id={`${id}-wrong`} role="alert">{wrong}</p>}
      <p className="dim" id={`${id}-about`}>{field.description}{field.description ? ". " : ""}{field.range ? `${field.range[0]!.toUpperCase()}${field.range.slice(1)}. ` : ""}
        {differs && <b>Default: {preset === "" ? "unset" : typeof preset === "boolean" ? (preset ? "on" : "off") : preset.length > 80 ? "another text" : preset}. </b>}{kept && differs && "Changed while it ran."}</p>
    </div>
  );
}
