/**
 * The panels, in the order of their tabs. A panel has an `id`, a `title` and
 *
 *     mount(root, app)
 *
 * which fills the element `root` when the panel is first shown, and returns an object whose `shown()`, if it has one, is
 * called each time it is. `app.tryPolicy(name)` opens the playground with that policy, and
 * `app.makePolicy({ name, description, attention })` the form of a new policy, filled in.
 */

import { explain } from "./explain.js";
import { frontier } from "./frontier.js";
import { keys } from "./keys.js";
import { live } from "./live.js";
import { playground } from "./playground.js";
import { policies } from "./policies.js";

export const PANELS = [playground, explain, frontier, live, policies, keys];
