import { useEffect, useState } from "react";
import { Dialog } from "../ui/parts";
import { personaNames } from "./Composer";
import type { Ask } from "./conversation";
import { keep, kept } from "../storage";
import type { ChatSettings as KeptSettings } from "../api/types";

/** What the questions of one chat are asked with. "" and null: as the operator has set it. */
export interface ChatSettings {
  mode: "chat" | "committee";
  model: string;
  temperature: number | null;
  personas: string[];
  rounds: number;
  /** Instructions for the model, behind the operator's. */
  systemPrompt: string;
}

export const USUAL: ChatSettings = { mode: "chat", model: "", temperature: null, personas: [], rounds: 1, systemPrompt: "" };

/** Those of a chat that has no session yet: they stay in this browser. */
export const newSettings = (): ChatSettings => ({ ...USUAL, ...kept<Partial<ChatSettings>>("chat.new", {}) });

export const keepNewSettings = (settings: ChatSettings): void => keep("chat.new", settings);

/** Those of a session, as the server keeps them. */
export function fromServer(settings: KeptSettings): ChatSettings {
  const { mode, model, temperature, personas, rounds, system_prompt } = settings;
  return { mode: mode ?? USUAL.mode, model: model ?? "", temperature: temperature ?? null, personas: personas ?? [], rounds: rounds ?? 1, systemPrompt: system_prompt ?? "" };
}

export function toServer({ mode, model, temperature, personas, rounds, systemPrompt }: ChatSettings): KeptSettings {
  return { mode, model: model || null, temperature, personas, rounds, system_prompt: systemPrompt || null };
}

/** The question as these settings ask it. */
export function asked(ask: Ask, { mode, model, temperature, personas, rounds, systemPrompt }: ChatSettings): Ask {
  return {
    ...ask,
    mode,
    ...(model ? { model } : {}),
    ...(temperature === null ? {} : { options: { temperature } }),
    ...(systemPrompt ? { system_prompt: systemPrompt } : {}),
    ...(mode === "committee" ? { rounds, ...(personas.length ? { personas } : {}) } : {}),
  };
}

interface ChatSettingsDialogProps {
  open: boolean;
  settings: ChatSettings;
  /** The model that answers when none is named. */
  usual: string;
  /** What the button says; the dialog asks once with these settings when it is not "Done". */
  action: string;
  onClose(): void;
  onDone(settings: ChatSettings): void;
}

export function ChatSettingsDialog({ open, settings, usual, action, onClose, onDone }: ChatSettingsDialogProps) {
  const [edited, edit] = useState(settings);
  const [names, setNames] = useState<string[] | null>(null);
  useEffect(() => {
    if (!open) return;
    edit(settings);
    void personaNames().then(setNames);
    // what is written in it stays, whatever another tab or the server says meanwhile
  }, [open]);
  const toggle = (name: string) => edit({ ...edited, personas: edited.personas.includes(name) ? edited.personas.filter((one) => one !== name) : [...edited.personas, name] });
  return (
    <Dialog open={open} onClose={onClose} title="How this chat is asked">
      <form className="form" onSubmit={(event) => { event.preventDefault(); onDone(edited); onClose(); }}>
        <label htmlFor="model">Model</label>
        <input id="model" value={edited.model} placeholder={usual || "the operator's choice"} maxLength={200} autoComplete="off" spellCheck={false} onChange={(event) => edit({ ...edited, model: event.target.value.trim() })} />
        <label htmlFor="temperature">Temperature <span className="dim">{edited.temperature === null ? "as it is set" : edited.temperature}</span></label>
        <div className="row">
          <input id="temperature" type="range" min="0" max="2" step="0.1" value={edited.temperature ?? 0.7} onChange={(event) => edit({ ...edited, temperature: Number(event.target.value) })} />
          <button type="button" className="quiet" disabled={edited.temperature === null} onClick={() => edit({ ...edited, temperature: null })}>As it is set</button>
        </div>
        <label htmlFor="system-prompt">Instructions for the model</label>
        <textarea id="system-prompt" rows={3} maxLength={20_000} dir="auto" placeholder="How it should answer in this chat, and what it should know" value={edited.systemPrompt} onChange={(event) => edit({ ...edited, systemPrompt: event.target.value })} />
        <label htmlFor="settings-mode">Mode</label>
        <select id="settings-mode" value={edited.mode} onChange={(event) => edit({ ...edited, mode: event.target.value as ChatSettings["mode"] })}>
          <option value="chat">Chat: the model answers</option>
          <option value="committee">Committee: personas deliberate before</option>
        </select>
        {edited.mode === "committee" && (
          <>
            <fieldset>
              <legend>Who deliberates, in this order</legend>
              {!names ? <p className="dim" role="status">Loading …</p> : names.length ? names.map((name) => (
                <label key={name} className="check">
                  <input type="checkbox" checked={edited.personas.includes(name)} onChange={() => toggle(name)} /> {name}
                  {edited.personas.includes(name) && <span className="dim"> {edited.personas.indexOf(name) + 1}</span>}
                </label>
              )) : (
                <input aria-label="Names, separated by commas" placeholder="Analyst, Skeptic" value={edited.personas.join(", ")} onChange={(event) => edit({ ...edited, personas: event.target.value.split(",").map((one) => one.trim()).filter(Boolean) })} />
              )}
            </fieldset>
            <label htmlFor="rounds">Rounds</label>
            <input id="rounds" type="number" min="1" max="10" value={edited.rounds} onChange={(event) => edit({ ...edited, rounds: Math.min(10, Math.max(1, Number(event.target.value) || 1)) })} />
          </>
        )}
        <div className="actions">
          <button type="button" className="quiet" onClick={() => edit(USUAL)}>Usual settings</button>
          <button type="submit" className="primary">{action}</button>
        </div>
      </form>
    </Dialog>
  );
}
