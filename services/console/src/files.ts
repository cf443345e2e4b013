// A user's files: their bytes, and how each kind of them is opened. Pure but for the requests.

import { request } from "./api/http";
import type { StoredFile } from "./api/types";
import { addressOf, releaseAddress } from "./storage";
import { counted } from "./words";

/** A file of a question, or of the list of files. */
export interface FileOf {
  id: string;
  name: string;
  /** Detected by the server from the content; "": not known. */
  type?: string;
  /** In bytes; null: not known. */
  size?: number | null;
  /** Of a PDF. */
  pages?: number | null;
  /** The file was deleted: it has no bytes. */
  deleted?: boolean;
}

export type Kind = "image" | "text" | "pdf" | "other";

// The page opens only these types, which cannot run in its origin. It saves HTML and SVG, which could.
const KINDS: Record<string, Kind> = {
  "image/png": "image", "image/jpeg": "image", "image/webp": "image", "image/gif": "image",
  "text/plain": "text", "text/markdown": "text", "application/pdf": "pdf",
};

/** Return the way to open a file; `other`: save it. Parameters of the type, such as a charset, do not count. */
export const kindOf = ({ type = "" }: Pick<FileOf, "type">): Kind => {
  const plain = type.split(";")[0]!.trim().toLowerCase();
  return Object.hasOwn(KINDS, plain) ? KINDS[plain]! : "other";
};

/** Return a file's bytes, with a type that is safe in the page's origin. Raises ApiError. */
export async function bytesOf(file: FileOf, signal?: AbortSignal): Promise<Blob> {
  const response = await request("GET", `files/${encodeURIComponent(file.id)}`, { signal });
  return new Blob([await response.arrayBuffer()], { type: safeType(file) });
}

export function safeType(file: Pick<FileOf, "type">): string {
  const kind = kindOf(file);
  if (kind === "text") return "text/plain;charset=utf-8";
  return kind === "other" ? "application/octet-stream" : file.type!.split(";")[0]!.trim().toLowerCase();
}

/** Add a file. Raises ApiError. */
export async function addFile(file: File, signal?: AbortSignal): Promise<StoredFile> {
  const path = `files?name=${encodeURIComponent(file.name || "pasted image")}`;
  const response = await request("POST", path, { body: file, headers: { "Content-Type": file.type || "application/octet-stream" }, signal });
  return (await response.json()) as StoredFile;
}

/** Give the user bytes as a file. */
export function saveBytes(name: string, bytes: Blob): void {
  const address = addressOf(bytes);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => releaseAddress(address), 10_000);
}

/** Return a number of bytes in a suitable unit. */
export function sizeOf(bytes: number): string {
  const units = ["kB", "MB", "GB"];
  let value = bytes / 1000;
  let at = 0;
  for (; value >= 999.5 && at < units.length - 1; at += 1) value /= 1000;
  return bytes < 1000 ? counted(bytes, "byte") : `${value.toFixed(value < 9.95 ? 1 : 0)} ${units[at]}`;
}

const NAMES: Record<string, string> = { "text/plain": "Text", "text/markdown": "Markdown", "text/html": "HTML", "application/pdf": "PDF", "image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WebP", "image/gif": "GIF" };

/** Return the name of a type. */
export const typeName = (type: string): string => (Object.hasOwn(NAMES, type) ? NAMES[type]! : type || "not known");

/** Return a file's facts without its name: "PDF, 12 pages, 1.2 MB". */
export const about = ({ type, size, pages }: FileOf): string => [
  type && typeName(type), pages && counted(pages, "page"), typeof size === "number" && sizeOf(size),
].filter(Boolean).join(", ");
