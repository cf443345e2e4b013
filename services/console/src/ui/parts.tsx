// Small parts that every place uses: dialogs, menus, buttons with a drawing, messages that go by themselves.

import * as Ariakit from "@ariakit/react";
import type { ComponentProps, ReactNode } from "react";
import { Icon, type IconName } from "./icons";

interface IconButtonProps extends ComponentProps<"button"> {
  icon: IconName;
  /** What it does, for those who do not see the drawing, and as its tooltip. */
  label: string;
  filled?: boolean;
}

export function IconButton({ icon, label, filled, className = "", ...rest }: IconButtonProps) {
  return (
    <button type="button" className={`icon-button ${className}`} aria-label={label} title={label} {...rest}>
      <Icon name={icon} filled={filled ?? false} />
    </button>
  );
}

interface DialogProps {
  open: boolean;
  onClose(): void;
  title: string;
  children: ReactNode;
  /** "full": as wide as its content, up to the window. */
  wide?: boolean | "full";
}

export function Dialog({ open, onClose, title, children, wide = false }: DialogProps) {
  return (
    <Ariakit.Dialog open={open} onClose={onClose} className={wide === "full" ? "dialog full" : wide ? "dialog wide" : "dialog"} backdrop={<div className="backdrop" />} unmountOnHide>
      <header className="dialog-head">
        <Ariakit.DialogHeading className="dialog-title">{title}</Ariakit.DialogHeading>
        <Ariakit.DialogDismiss className="icon-button" aria-label="Close"><Icon name="close" /></Ariakit.DialogDismiss>
      </header>
      {children}
    </Ariakit.Dialog>
  );
}

export interface Choice {
  name: string;
  icon?: IconName;
  act(): void;
  danger?: boolean;
}

export function Menu({ label, icon, choices, className = "" }: { label: string; icon: IconName; choices: Choice[]; className?: string }) {
  return (
    <Ariakit.MenuProvider>
      <Ariakit.MenuButton className={`icon-button ${className}`} aria-label={label} title={label}><Icon name={icon} /></Ariakit.MenuButton>
      <Ariakit.Menu className="menu" gutter={4} portal unmountOnHide>
        {choices.map((choice) => (
          <Ariakit.MenuItem key={choice.name} className={choice.danger ? "menu-item danger" : "menu-item"} onClick={choice.act}>
            {choice.icon && <Icon name={choice.icon} />}
            {choice.name}
          </Ariakit.MenuItem>
        ))}
      </Ariakit.Menu>
    </Ariakit.MenuProvider>
  );
}

/** A number of seconds in words that are as precise as somebody wants them. */
export function age(seconds: number): string {
  const steps: [number, string][] = [[60, "s"], [60, "min"], [24, "h"], [365, "d"]];
  let value = Math.max(0, seconds || 0);
  for (const [size, unit] of steps) {
    if (value < size) return `${Math.floor(value)} ${unit} ago`;
    value /= size;
  }
  return `${Math.floor(value)} y ago`;
}

export const duration = (ms: number): string => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** 5 and 4 are good, 3 is fair, 2 and 1 are poor; "" for what is no grade. */
export function colourOf(score: unknown): "" | "good" | "fair" | "poor" {
  if (typeof score !== "number" || !Number.isInteger(score)) return "";
  return score >= 4 ? "good" : score === 3 ? "fair" : "poor";
}

/** A verdict in a few words, for the answer of a respondent. */
export function verdictOf(winner: string, respondent = "A"): string {
  if (winner === "tie") return "as good as the other";
  return winner === respondent ? "better than the other" : "the other was better";
}
