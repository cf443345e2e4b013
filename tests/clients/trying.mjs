// What the scripts of this folder share: try a feature, and say in a line of JSON what came of it.

export async function tried(feature, attempt, wanted, way = "") {
  let trouble = "";
  try {
    const result = await attempt();
    const right = typeof wanted === "function" ? wanted(result) : result === wanted;
    if (!right) trouble = `it gave ${JSON.stringify(result)}`;
  } catch (error) {
    trouble = `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ tried: true, feature, way, trouble: trouble.replace(/\s+/g, " ").slice(0, 500) }));
}

// The client has nothing of the kind.
export function notOffered(feature, why) {
  console.log(JSON.stringify({ tried: true, feature, not_offered: why }));
}

// An attempt that must fail so: what `is` says of the error.
export const raised = (attempt, is = () => true) => async () => {
  try {
    await attempt();
  } catch (error) {
    if (is(error)) return true;
    throw error;
  }
  return false;
};
