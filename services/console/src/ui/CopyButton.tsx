import { useState } from "react";
import { copied } from "../markdown/dress";
import { IconButton } from "./parts";

/** A button that copies a text and shows the result. */
export function CopyButton({ text, label }: { text: string; label: string }) {
  const [done, setDone] = useState("");
  return (
    <>
      <IconButton icon={done === "Copied" ? "check" : "copy"} label={label} onClick={(event) => {
        const said = document.createElement("span");
        void copied(text, said).then(() => {
          setDone(said.textContent ?? "");
          setTimeout(() => setDone(""), 1500);
        });
        event.currentTarget.focus();
      }} />
      <span className="hidden-text" role="status">{done}</span>
    </>
  );
}
