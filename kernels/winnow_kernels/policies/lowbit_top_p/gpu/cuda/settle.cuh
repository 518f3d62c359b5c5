// From where on to list, and where selections end: by what is expected, and by what is counted.

// What is known of a query head before its pair is scored.
struct Recalled {
    float kept = 0.0f;
    int anchor_top = UNKNOWN, anchor_cut = UNKNOWN, anchor_end = UNKNOWN;
    int unit = 0, start = NEVER, counted_from = NEVER;

    template <bool AGAIN>
    DEVICE void load(const Arguments& all, int64 slot, int pair, int head) {
        if (head >= GROUP) return;
        const int64 of_column = static_cast<int64>(pair) * PADDED + head;
        const int64 of_request = place_of_anchor(slot, pair, head);
        anchor_top = all.anchor_tops[of_request];
        anchor_cut = all.anchor_cuts[of_request];
        anchor_end = all.anchor_ends[of_request];
        if (AGAIN) {
            kept = all.kept[static_cast<int64>(pair) * STRIDE + head];
            unit = all.units[of_column];
            start = all.starts[of_column];
            counted_from = all.counted_from[of_column];
        }
    }

    // What has just been prepared.
    DEVICE void begin(float steps) {
        kept = steps;
        unit = unit_of(steps);
    }

    DEVICE void store(Shared& shared, int head) const {
        shared.kept[head] = kept;
        shared.anchor_tops[head] = anchor_top;
        shared.anchor_cuts[head] = anchor_cut;
        shared.anchor_ends[head] = anchor_end;
        shared.units[head] = unit;
        shared.starts[head] = start;
        shared.counted_from[head] = counted_from;
        shared.tops[head] = UNKNOWN;
    }
};

// The step below which all `tokens` together weigh no more than a share of the mass leaves.
DEVICE int surest_start(double share, float total, int tokens) {
    const float weight = static_cast<float>(1.0 - share) * total / static_cast<float>(tokens);
    // One less, for what rounding adds up to.
    return static_cast<int>(floorf(log2f(fmaxf(weight, 1e-30f)) * STEPS)) - 1;
}

// The highest step whose tokens weigh nothing beside a mass.
DEVICE int floor_of(float total) { return static_cast<int>(ceilf(log2f(total) * STEPS)) - 1 - STEPS_TO_FLOOR; }

// From where on to list and to count, before the mass is known. One thread a query head.
DEVICE void expect(Shared& shared, const Bounds& bounds, int head) {
    float sampled = 0.0f;
    for (int warp = 0; warp < WARPS; ++warp) sampled += shared.sampled[warp][head];
    const int unit = shared.units[head], tokens = bounds.scored - bounds.sinks, anchor = shared.anchor_cuts[head];
    const float of_sample = static_cast<float>(tokens) / (WARPS * SAMPLED_BLOCKS * BLOCK);
    // A token that outweighs all others need not be in a sample. Where one was, counts shall reach.
    const int last_top = clamp(shared.anchor_tops[head] - unit - 5 * STEPS, EVERYTHING, 100 * STEPS);
    const float found = kept_mass(shared.kept[head], unit) + sampled * of_sample;
    const float total = fminf(fmaxf(found, mass_of(last_top)), MAX_EXPECTED);
    const int floor = unit + floor_of(total);
    int start = unit + surest_start(shared.share, total, tokens) - STEPS;
    const int by_floor = floor + anchor - SPARE, by_end = shared.anchor_ends[head] - SPARE_OF_END;
    const int expected = by_floor < by_end ? by_floor : by_end;
    if (anchor >= 0 && expected > start) start = expected;
    const bool takes_everything = shared.share > WHOLE_ABOVE || (anchor < 0 && anchor != UNKNOWN);
    // A sample may tell too much or too little.
    const int least = floor - 2 * STEPS;
    shared.counted_from[head] = start > least && !takes_everything ? start : least;
    shared.starts[head] = takes_everything ? EVERYTHING : start;
}

// Where a query head's selection ends, by what is counted; one warp a head.
struct Cut {
    int step;
    int top;
    int counted;
    double mass;
};

// Counts of steps, one lane having neighbouring ones: the first lane the highest.
struct Counts {
    static constexpr int OWN = BINS / WARP;
    int counts[OWN];

    // Load a query head's, and leave zeros.
    DEVICE void take(int* counters, int lane) {
        for (int each = 0; each < OWN; ++each) counts[each] = load_shared_by_blocks(counters + step_of(0, lane, each));
        for (int each = 0; each < OWN; ++each) counters[step_of(0, lane, each)] = 0;
    }

    DEVICE static int step_of(int first, int lane, int each) { return first + BINS - 1 - lane * OWN - each; }

    DEVICE Cut cut(int first, int unit, int floor, double missing, int least, int lane) const {
        double masses[OWN], mass = 0.0;
        int count = 0, top = UNKNOWN;
        for (int each = 0; each < OWN; ++each) {
            const int step = step_of(first, lane, each);
            // What nobody counted may weigh more than a number can say.
            const bool weighs = step > floor && counts[each] > 0;
            masses[each] = weighs ? counts[each] * static_cast<double>(mass_of(step - unit)) : 0.0;
            mass += masses[each];
            count += step > floor ? counts[each] : 0;
            if (counts[each] > 0 && step > top) top = step;
        }
        int count_to = count;
        double mass_to = mass;
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int source = lane >= distance ? lane - distance : lane;
            const int of_others = from_lane(count_to, source);
            const double mass_of_others = from_lane(mass_to, source);
            if (lane >= distance) count_to += of_others, mass_to += mass_of_others;
        }
        int above = count_to - count, lowest = NEVER;
        double mass_above = mass_to - mass;
        for (int each = 0; each < OWN; ++each) {
            const int step = step_of(first, lane, each);
            const int own = step > floor ? counts[each] : 0;
            if ((mass_above < missing || above < least) && own > 0) lowest = step;
            above += own;
            mass_above += masses[each];
        }
        for (int mask = 1; mask < WARP; mask *= 2) {
            const int other = from_xor(lowest, mask), other_top = from_xor(top, mask);
            lowest = other < lowest ? other : lowest;
            top = other_top > top ? other_top : top;
        }
        return {lowest, top, from_lane(count_to, WARP - 1), from_lane(mass_to, WARP - 1)};
    }
};

// The sums over tiles of all heads' masses; in the same order whatever blocks had which tiles.
DEVICE void sum_masses(const Arguments& all, Shared& shared, int pair, int tiles, int thread) {
    // Loaded at once, since memory is far away.
    constexpr int AT_ONCE = 8;
    double* const sums = sums_of(shared);
    if (thread < SUMMING) {
        double sum = 0.0;
        const float* masses = all.masses + static_cast<int64>(pair) * all.tiles * PADDED;
        for (int first = thread; first < tiles * PADDED; first += AT_ONCE * SUMMING) {
            float own[AT_ONCE];
            for (int each = 0; each < AT_ONCE; ++each) {
                const int place = first + each * SUMMING;
                own[each] = place < tiles * PADDED ? load_shared_by_blocks(masses + place) : 0.0f;
            }
            for (float mass : own) sum += mass;
        }
        sum = sum_of_lanes<PADDED>(sum);
        if (thread % WARP < PADDED) sums[thread / WARP * PADDED + thread % WARP] = sum;
    }
    sync_block();
}

// Of a query head, of what warps have added up.
DEVICE double sum_of(Shared& shared, int head) {
    double sum = 0.0;
    for (int warp = 0; warp < SUMMING / WARP; ++warp) sum += sums_of(shared)[warp * PADDED + head];
    return sum;
}

// Cut a query head, of which all is known, or open it. One warp.
DEVICE void settle_head(const Arguments& all, Shared& shared, const Bounds& bounds, const Counts& counts, int row,
                        int pair, int head, bool again, int lane) {
    const int64 of_head = static_cast<int64>(pair) * STRIDE + head,
                of_column = static_cast<int64>(pair) * PADDED + head;
    const int unit = shared.units[head], first = shared.counted_from[head], start = shared.starts[head];
    const float kept = kept_mass(shared.kept[head], unit);
    const float total = static_cast<float>(kept + sum_of(shared, head));
    // In another unit it is a number. What makes it so large is listed.
    const bool is_lost = !(total < MAX_MASS);
    const int floor = is_lost ? unit : unit + floor_of(total);
    const double missing = shared.share * total - kept;
    // With what is kept, `least` tokens; fewer if there are no more.
    const int tokens = bounds.scored - bounds.sinks, more = shared.least - bounds.kept();
    const int least = more < tokens ? more : tokens;
    const Cut cut = counts.cut(first, unit, floor, missing, least, lane);
    if (lane != 0) return;
    const bool overflows = cut.top - first >= BINS - 1, is_short = cut.mass < missing || cut.counted < least;
    const int top = overflows ? load_shared_by_blocks(all.tops + of_head) : cut.top;
    const bool takes_everything = shared.share > WHOLE_ABOVE, takes_all = is_short || takes_everything;
    // What everything is listed of, and counted as far as it weighs something, is as long as can be.
    const bool is_complete = takes_everything || (start == EVERYTHING && first <= floor + 1);
    const bool is_open = !again && (is_lost || overflows || (is_short && !is_complete));
    all.cuts[of_column] = takes_all ? EVERYTHING : cut.step;
    if (is_open) {
        // What is up to the floor weighs something in the mass, but nothing where it is selected.
        const int surest = is_lost ? floor : unit + surest_start(shared.share, total, tokens);
        const bool lists_all = is_lost || takes_everything || cut.counted < least || surest <= floor;
        all.units[of_column] = is_lost ? top & -STEPS : unit;
        all.starts[of_column] = lists_all ? EVERYTHING : surest;
        // Without a mass there is no floor: as far down as counts reach.
        all.counted_from[of_column] = is_lost ? top - BINS + STEPS : lists_all ? floor + 1 : surest;
        // Several warps and blocks may write this.
        publish(all.pair_open + pair, 1);
        publish(all.any_open, 1);
    } else {
        all.starts[of_column] = start;
        all.counted_from[of_column] = first;
        const int64 of_request = place_of_anchor(all.slots[row], pair, head);
        const int anchor = shared.anchor_cuts[head], above = takes_all ? TOOK_EVERYTHING : cut.step - floor;
        const int end = shared.anchor_ends[head];
        const bool remembers = !takes_all && anchor >= 0;
        all.anchor_tops[of_request] = top;
        // A low cut is remembered for a while: of neighbouring steps some need far more tokens than others.
        all.anchor_cuts[of_request] = remembers && anchor + 1 < above ? anchor + 1 : above;
        all.anchor_ends[of_request] = remembers && end + 1 < cut.step ? end + 1 : cut.step;
    }
    all.open[of_head] = is_open ? 1 : again && all.open[of_head] != 0 ? 2 : 0;
    all.tops[of_head] = UNKNOWN;
    // Marks of a byte, for what puts selections in order: the floor has one from 8 to 15.
    const int base = (floor - STEPS) & -STEPS;
    all.bases[of_head] = base;
    all.floors[of_head] = floor - base;
    all.totals[of_head] = total * mass_of(unit - base - STEPS_TO_FLOOR);
}

// Add up a pair that all of its tiles are known of, and cut; or open it, to be listed again.
DEVICE void settle(const Arguments& all, Shared& shared, const Bounds& bounds, int row, int pair, bool again,
                   int thread) {
    const int warp = thread / WARP, lane = thread % WARP;
    Counts counts;
    if (warp < GROUP) counts.take(all.histograms + (static_cast<int64>(pair) * STRIDE + warp) * BINS, lane);
    // The second time it stays: blocks that start later share what was open.
    if (thread == 0 && !again) all.pair_open[pair] = 0;
    sum_masses(all, shared, pair, bounds.tiles(), thread);
    if (warp < GROUP) settle_head(all, shared, bounds, counts, row, pair, warp, again, lane);
    // Sums lie where the next pair's tiles are copied to.
    fence_copies();
    sync_block();
}
