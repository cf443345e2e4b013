// The messages array of a chat, as the model gets it before the next question.

import { useEffect, useState } from "react";
import { call } from "../api/http";
import { inZone } from "../api/zone";
import type { components } from "../api/schema";
import type { SessionShown } from "../api/types";
import { CopyButton } from "../ui/CopyButton";
import { Dialog } from "../ui/parts";
import { counted } from "../words";

type Message = components["schemas"]["ChatTurnMessage"];

const ROLES: Record<Message["role"], string> = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };

interface ConversationStateProps {
  open: boolean;
  sessionId: string;
  /** Changes with the conversation. */
  state: string;
  onClose(): void;
}

export function ConversationState({ open, sessionId, state, onClose }: ConversationStateProps) {
  const [messages, setMessages] = useState<Message[] | null>(null);
  const [wrong, setWrong] = useState("");
  useEffect(() => {
    if (!open) return undefined;
    let over = false;
    inZone((zone) => call<SessionShown>("GET", `sessions/${encodeURIComponent(sessionId)}?limit=1${zone ? `&time_zone=${encodeURIComponent(zone)}` : ""}`)).then(
      (shown) => {
        if (over) return;
        setMessages(shown.messages);
        setWrong(shown.messages ? "" : `The messages cannot be shown now: ${shown.messages_missing}`);
      },
      (error: Error) => { if (!over) setWrong(error.message); },
    );
    return () => { over = true; };
  }, [open, sessionId, state]);
  return (
    <Dialog open={open} onClose={onClose} title="Conversation state" wide>
      <div className="row">
        <p className="dim">{messages ? counted(messages.length, "message") : "Messages"} as the model gets them before your next question, without thinking.</p>
        <span className="spring" />
        {messages && messages.length > 0 && <CopyButton text={JSON.stringify(messages, null, 2)} label="Copy the messages as JSON" />}
      </div>
      {wrong && <p className="error-text" role="alert">{wrong}</p>}
      {!messages && !wrong && <p className="dim" role="status">Loading …</p>}
      {messages?.length === 0 && <p className="dim">The model has seen nothing of this chat yet.</p>}
      <ol className="messages" aria-label="Messages">
        {messages?.map((message, at) => (
          <li key={at} className={`message ${message.role}`}>
            <p className="message-role"><span className="badge">{ROLES[message.role]}</span> {message.name && <code>{message.name}</code>}</p>
            {message.content && <p className="message-text" dir="auto">{message.content}</p>}
            {message.tool_calls?.map((one, place) => <pre key={place} className="json wrapped" tabIndex={0} dir="ltr">{JSON.stringify(one, null, 2)}</pre>)}
            {message.attachments && message.attachments.length > 0 && <p className="dim">{counted(message.attachments.length, "image")} attached</p>}
          </li>
        ))}
      </ol>
    </Dialog>
  );
}
