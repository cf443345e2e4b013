import * as Ariakit from "@ariakit/react";
import { useMemo, useState } from "react";
import type { Choice } from "./parts";

/** Everything that the page can do, by its words. */
export function Palette({ open, onClose, choices }: { open: boolean; onClose(): void; choices: Choice[] }) {
  const [words, setWords] = useState("");
  const found = useMemo(() => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    return choices.filter(({ name }) => wanted.every((word) => name.toLowerCase().includes(word))).slice(0, 12);
  }, [words, choices]);
  return (
    <Ariakit.Dialog open={open} onClose={() => { setWords(""); onClose(); }} className="palette" aria-label="Commands" backdrop={<div className="backdrop" />} unmountOnHide>
      <Ariakit.ComboboxProvider open setValue={setWords} value={words} focusLoop={true}>
        <Ariakit.Combobox autoSelect="always" className="palette-field" placeholder="What do you want to do?" aria-label="Command" autoFocus />
        <Ariakit.ComboboxList className="palette-list" alwaysVisible aria-label="Commands">
          {found.map((choice) => (
            <Ariakit.ComboboxItem key={choice.name} className="menu-item" setValueOnClick={false} hideOnClick={false} focusOnHover
              onClick={() => { setWords(""); onClose(); choice.act(); }}>{choice.name}</Ariakit.ComboboxItem>
          ))}
          {!found.length && <p className="dim">Nothing of that name.</p>}
        </Ariakit.ComboboxList>
      </Ariakit.ComboboxProvider>
    </Ariakit.Dialog>
  );
}
