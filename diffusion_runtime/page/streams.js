// Streams: frames of a causal model while they are made.
import { el } from "./dom.js";

export const streamsView = () => ({ title: "Streams", node: el("p", {}, "This model makes no streams.") });
