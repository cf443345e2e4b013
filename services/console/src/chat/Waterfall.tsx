import { useEffect, useState } from "react";
import { call } from "../api/http";
import type { TurnTold } from "../api/types";
import { Dialog, duration } from "../ui/parts";
import { answerOf, finishOf, modelOf, usageOf, type Turn } from "./turn";
import { counted } from "../words";

/** The messages on the bus for a question, and their times. */
export function Waterfall({ sessionId, turn, onClose }: { sessionId: string | null; turn: Turn | null; onClose(): void }) {
  const [result, setResult] = useState<TurnTold | null>(null);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    setResult(null);
    setTrouble("");
    if (!turn || sessionId === null) return;
    call<TurnTold>("GET", `sessions/${encodeURIComponent(sessionId)}/turns/${turn.queryId}?event_log=true`).then(setResult, (error: Error) => setTrouble(error.message));
  }, [sessionId, turn]);
  const log = result?.event_log ?? [];
  const whole = Math.max(0.001, ...log.map((one) => one.t));
  return (
    <Dialog open={turn !== null} onClose={onClose} title="What happened" wide>
      {turn && (
        <dl className="facts">
          <dt>Question</dt><dd dir="auto">{turn.query.slice(0, 300) || turn.files.map(({ name }) => name).join(", ")}</dd>
          <dt>Model</dt><dd>{modelOf(turn) ?? "not known"}</dd>
          <dt>Tokens</dt><dd>{usageOf(turn).prompt_tokens} read, {usageOf(turn).completion_tokens} written</dd>
          <dt>Answer</dt><dd>{counted(answerOf(turn).length, "character")}{finishOf(turn) ? `, ended by ${finishOf(turn)}` : ""}</dd>
          <dt>Question's id</dt><dd><code>{turn.queryId}</code></dd>
        </dl>
      )}
      {trouble && <p className="note">{trouble}</p>}
      {log.length > 0 && (
        <div className="table" role="region" aria-label="Messages of the bus" tabIndex={0}>
          <table className="waterfall">
            <thead><tr><th scope="col">Message</th><th scope="col">After</th><th scope="col" aria-label="Time" /></tr></thead>
            <tbody>
              {log.map((one, at) => (
                <tr key={at}>
                  <td>{one.subject}</td>
                  <td className="number">{duration(one.t * 1000)}</td>
                  <td className="bar-cell"><svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true"><rect x={(97 * one.t) / whole} y="0" width="3" height="4" /></svg></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Dialog>
  );
}
