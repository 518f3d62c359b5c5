// Taking: what is listed and reaches its heads' cuts is written as slots, in the context's order, with what is believed
// of its mass. A pair's blocks add up what those before them take, which they look back at. Few of the listed tokens are
// taken: a warp puts them side by side in shared memory first. Grid: blocks of a pair × pairs.

constexpr int WARPS = TAKE_WARPS;
constexpr int THREADS = WARPS * WARP;
// Entries, or slots, that a lane loads at once, each of another run.
constexpr int AT_ONCE = 4;
// Tokens that a warp has room for in shared memory: as a rule, more than it takes.
constexpr int ROOM = TAKE_ROOM;
static_assert(ROOM % (AT_ONCE * WARP) == 0, "lanes have room for as many tokens each");
// Masses are added up in whole numbers of these, so that it makes no difference in which order.
constexpr float GRAIN = 9.094947e-13f;

// Tokens that a warp takes, in order.
struct Tokens {
    uint32 steps[ROOM][PADDED / 2];
    int positions[ROOM];
};

struct Shared {
    Tokens tokens[WARPS];
    int64 masses[WARPS][PADDED];
    int cuts[PADDED], floors[PADDED], to_marks[PADDED];
    int taken[WARPS];
    int before;
    int is_last;
};

// Steps of an entry's query heads.
struct Entry {
    uint32 words[PADDED / 2];

    DEVICE void load(const Arguments& all, int64 entry) { load_words(words, all.steps + entry * (PADDED / 2)); }

    DEVICE int step(int head) const { return step_in(words, head); }

    DEVICE bool reaches(const int (&cuts)[PADDED]) const {
        bool any = false;
        for (int head = 0; head < PADDED; ++head) any |= step(head) >= cuts[head];
        return any;
    }
};

// Some neighbouring tiles, at most as many as lanes, of whose entries a warp takes 32 at a time: a run. Tiles list very
// different numbers of tokens, so it is runs that are loaded at once.
struct Runs {
    int first, listed, up_to;

    // Of tiles from `first` on; lane i holds how many entries the i-th has.
    DEVICE Runs(int first, int listed, int lane) : first(first), listed(listed) {
        up_to = sum_up_to((listed + WARP - 1) / WARP, lane);
    }

    DEVICE int count() const { return from_lane(up_to, WARP - 1); }

    // The place in the block's tokens where this lane's entry of a run is written down, or −1 where there is none.
    DEVICE int place_of(int run, int lane) const {
        const int tile = bits_set(ballot(up_to <= run));
        const int earlier = from_lane(up_to, tile > 0 ? tile - 1 : 0), entries = from_lane(listed, tile & (WARP - 1));
        const int number = (run - (tile > 0 ? earlier : 0)) * WARP + lane;
        return tile < WARP && number < entries ? (first + tile) * TILE + number : -1;
    }
};

// A warp's part of a pair's tiles.
struct Part {
    const Arguments& all;
    const int* listed;
    // The block's first token in what is listed of all pairs, and its first tile.
    int64 of_tokens;
    int first;
    // Of the block's tiles, the warp's.
    int begin, end;

    // Count the tokens that reach the cuts, and hold on to the ROOM tokens from number `from` on.
    DEVICE int find(Tokens& tokens, const int (&cuts)[PADDED], int from, int lane) const {
        const uint32 before = (1u << lane) - 1;
        int found = 0;
        for (int tile = begin; tile < end; tile += WARP) {
            const Runs runs(tile, tile + lane < end ? listed[tile + lane] : 0, lane);
            for (int run = 0, all_runs = runs.count(); run < all_runs; run += AT_ONCE) {
                Entry entries[AT_ONCE];
                int positions[AT_ONCE];
#pragma unroll
                for (int each = 0; each < AT_ONCE; ++each) {
                    const int at = runs.place_of(run + each, lane);
                    positions[each] = -1;
                    if (at >= 0) {
                        entries[each].load(all, of_tokens + at);
                        positions[each] = (first + at / TILE) * TILE + all.places[of_tokens + at];
                    }
                }
#pragma unroll
                for (int each = 0; each < AT_ONCE; ++each) {
                    const bool is_taken = positions[each] >= 0 && entries[each].reaches(cuts);
                    const uint32 word = ballot(is_taken);
                    const int number = found + bits_set(word & before) - from;
                    if (is_taken && number >= 0 && number < ROOM) {
                        store_words(tokens.steps[number], entries[each].words);
                        tokens.positions[number] = positions[each];
                    }
                    found += bits_set(word);
                }
            }
        }
        sync_warp();
        return found;
    }
};

DEVICE int order_of(const float (&weights)[PADDED], const Arguments& all, int64 of_heads) {
    float mean = 0.0f;
    for (int head = 0; head < GROUP; ++head) mean += weights[head] / all.totals[of_heads + head];
    mean *= 1.0f / GROUP;
    const int key = clamp(static_cast<int>(floorf(log2f(fmaxf(mean, 7.888609e-31f)) * KEY_STEPS)), LOWEST_KEY, 0);
    return ORDERS - 1 - (key - LOWEST_KEY) / ORDER_KEYS;
}

// The tokens that a warp takes, and what it needs to weigh them.
struct Taken {
    const Arguments& all;
    const Shared& shared;
    const Tokens& tokens;
    int row, pair;
    // Whether the selection may be put in order.
    bool is_in_order;

    DEVICE int mark(int number, int head) const { return step_in(tokens.steps[number], head) + shared.to_marks[head]; }

    DEVICE float weight(int mark, int head) const {
        return mark > shared.floors[head] ? mass_of(mark - STEPS_TO_FLOOR) : 0.0f;
    }
};

// Some of a warp's tokens at a time: AT_ONCE of each lane.
struct Some {
    static constexpr int TOKENS = AT_ONCE * WARP;

    // The lane's first one's number; positions are −1 where it has none.
    int first;
    int positions[AT_ONCE], slots[AT_ONCE];

    // Of those that the warp has from number `begin` on, up to `end`.
    DEVICE void look_up(const Taken& taken, int begin, int end, int lane) {
        first = begin + lane;
#pragma unroll
        for (int each = 0; each < AT_ONCE; ++each) {
            const int number = first + each * WARP;
            positions[each] = number < end ? taken.tokens.positions[number] : -1;
            slots[each] = positions[each] < 0 ? 0 : slot_at(taken.all, taken.row, positions[each]);
        }
    }

    // Add up their masses, and write down their marks.
    DEVICE void weigh(const Taken& taken, int64 (&masses)[PADDED]) const {
#pragma unroll
        for (int each = 0; each < AT_ONCE; ++each) {
            if (positions[each] < 0) continue;
            for (int head = 0; head < PADDED; ++head) {
                const int mark = taken.mark(first + each * WARP, head);
                masses[head] += static_cast<int64>(taken.weight(mark, head) * (1.0f / GRAIN));
                if (taken.is_in_order && head < STRIDE) {
                    const int64 token = taken.pair * taken.all.tokens + positions[each];
                    taken.all.marks[token * STRIDE + head] = static_cast<uint8>(clamp(mark, 0, 255));
                }
            }
        }
    }

    // Write them down behind `kept` tokens and `others` before the warp's first.
    DEVICE void write(const Taken& taken, int others, int kept) const {
        const Arguments& all = taken.all;
#pragma unroll
        for (int each = 0; each < AT_ONCE; ++each) {
            if (positions[each] < 0) continue;
            const int number = first + each * WARP, place = others + number;
            if (kept + place < all.width) all.selected_slots[taken.pair * all.width + kept + place] = slots[each];
            if (!taken.is_in_order) continue;
            float weights[PADDED];
            for (int head = 0; head < PADDED; ++head) weights[head] = taken.weight(taken.mark(number, head), head);
            all.listed[taken.pair * all.tokens + place] = positions[each];
            all.orders[taken.pair * all.tokens + place] =
                static_cast<uint8>(order_of(weights, all, static_cast<int64>(taken.pair) * STRIDE));
        }
    }
};

// Add a warp's masses to what the block has of it.
DEVICE void add_masses(Shared& shared, int64 (&masses)[PADDED], int warp, int lane) {
    const int64 mass = own_sum_of_lanes(masses, lane);
    if (lane < PADDED) shared.masses[warp][lane] += mass;
    for (int64& own : masses) own = 0;
}

// What is known of a pair when its last block is through: of a query head's kept tokens and of all.
struct Known {
    int cap = 0, unit = 0;
    float kept = 0.0f, total = 0.0f;

    DEVICE Known(const Arguments& all, int row, int pair, int head) {
        cap = all.most[row];
        if (head >= GROUP) return;
        const int64 place = static_cast<int64>(pair) * STRIDE + head;
        unit = all.bases[place] + STEPS_TO_FLOOR;
        kept = all.kept[place];
        total = all.totals[place];
    }
};

// The counts, and what is believed, of a pair that is written; a warp for each query head.
DEVICE void finish(const Arguments& all, const Bounds& bounds, const Known& known, int row, int pair, int blocks, int warp,
                   int lane) {
    const int kept = bounds.kept();
    const int of_block = lane < blocks ? load_shared_by_blocks(all.published + pair * BLOCKS_OF_PAIR + lane) - 1 : 0;
    int64 of_head = 0;
    if (warp < GROUP && lane < blocks)
        of_head = load_shared_by_blocks(all.taken + (static_cast<int64>(pair) * BLOCKS_OF_PAIR + lane) * PADDED + warp);
    const int others = sum_of_lanes(of_block), tokens = kept + others;
    // A cap that would be read whole by itself is none.
    const int cap = known.cap;
    const float most = static_cast<float>(bounds.length) * WHOLE_SHARE;
    int limit = cap > kept ? cap : kept;
    limit = cap == 0 || static_cast<float>(limit) > most ? tokens : tokens < limit ? tokens : limit;
    const bool is_whole = static_cast<float>(limit) > most || limit > all.width;
    if (warp == 0 && lane == 0) {
        if (all.in_order) all.others[pair] = is_whole ? 0 : others;
        all.selected_counts[pair] = is_whole ? WHOLE_TO_THE_END : tokens;
        const int64 codes = static_cast<int64>(bounds.scored / BLOCK) * BLOCK_BYTES;
        add_atomically(all.read + row * all.read_stride + READ_BYTES, static_cast<int64>(kept) * all.key_bytes + codes);
        all.met[pair] = 0;
    }
    const int64 grains = sum_of_lanes(of_head);
    if (warp < GROUP && lane == 0) {
        const int64 place = static_cast<int64>(pair) * STRIDE + warp;
        const float mass = kept_mass(known.kept, known.unit) + static_cast<float>(grains) * GRAIN;
        const float rest = fmaxf(known.total - mass, 0.0f), of_unit = static_cast<float>(known.unit) * (1.0f / STEPS);
        all.rests[place] = rest;
        float* const believed = all.beliefs + (static_cast<int64>(pair) * GROUP + warp) * 2;
        believed[0] = is_whole ? NO_MASS : of_unit + log2f(fmaxf(mass, 1e-30f));
        believed[1] = is_whole || !(rest > 0.0f) ? NO_MASS : of_unit + log2f(fmaxf(rest, 1e-30f));
    }
    sync_block();
    if (warp == 0 && lane < blocks) all.published[pair * BLOCKS_OF_PAIR + lane] = 0;
}

// How many tokens the pair's earlier blocks take. Blocks start in the order of their numbers: those run, or have run.
DEVICE int taken_before(const Arguments& all, int pair, int block, int lane) {
    int earlier = 0;
    for (int other = lane; other < block; other += WARP) {
        int published = 0;
        while (published == 0) published = load_published(all.published + pair * BLOCKS_OF_PAIR + other);
        earlier += published - 1;
    }
    return sum_of_lanes(earlier);
}

KERNEL(THREADS, 4) take_kernel(const Arguments all) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    int* const listed = reinterpret_cast<int*>(memory + sizeof(Shared));
    const int thread = thread_number(), warp = thread / WARP, lane = thread % WARP;
    const int pair = block_number_y(), row = pair / KV_HEADS, block = block_number(), blocks = blocks_in_grid();
    // What no kernel of a selection writes need not be waited for.
    const Bounds bounds(all, row);
    const int kept = bounds.kept();
    wait_for_last_kernel();
    let_next_kernel_begin();
    // By now nobody asks any more whether pairs are listed again.
    if (pair == 0 && block == 0 && thread == 0) all.any_open[0] = 0;
    if (bounds.scored == 0) return;
    const int64 of_heads = static_cast<int64>(pair) * STRIDE;
    const int share = (bounds.tiles() + blocks - 1) / blocks, first = block * share;
    const int count = clamp(bounds.tiles() - first, 0, share);
    for (int tile = thread; tile < count; tile += THREADS)
        listed[tile] = all.counts[static_cast<int64>(pair) * all.tiles + first + tile];
    if (thread < PADDED) {
        const int64 of_column = static_cast<int64>(pair) * PADDED + thread;
        const bool is_head = thread < GROUP;
        shared.cuts[thread] = is_head ? all.cuts[of_column] - all.units[of_column] : NEVER;
        shared.floors[thread] = is_head ? all.floors[of_heads + thread] : NEVER;
        shared.to_marks[thread] = is_head ? all.units[of_column] - all.bases[of_heads + thread] : 0;
    }
    sync_block();
    int cuts[PADDED];
    for (int head = 0; head < PADDED; ++head) cuts[head] = shared.cuts[head];
    // Warps have neighbouring tiles each.
    const int of_warp = (count + WARPS - 1) / WARPS, begin = warp * of_warp, end = clamp(begin + of_warp, 0, count);
    const int64 of_tokens = pair * all.tokens + static_cast<int64>(first) * TILE;
    const Part part{all, listed, of_tokens, first, begin, end};
    Tokens& own = shared.tokens[warp];
    const int count_taken = part.find(own, cuts, 0, lane);
    if (lane == 0) shared.taken[warp] = count_taken;
    if (lane < PADDED) shared.masses[warp][lane] = 0;
    sync_block();
    if (thread == 0) {
        int of_block = 0;
        for (int each = 0; each < WARPS; ++each) of_block += shared.taken[each];
        publish(all.published + pair * BLOCKS_OF_PAIR + block, of_block + 1);
    }
    // What does not depend on the blocks before comes before they are asked: as a rule, all but writing.
    const bool is_in_order = all.in_order && (all.by_score[row] != 0 || all.most[row] > 0);
    const Taken taken{all, shared, own, row, pair, is_in_order};
    int64 masses[PADDED] = {};
    Some some;
    some.look_up(taken, 0, count_taken < ROOM ? count_taken : ROOM, lane);
    some.weigh(taken, masses);
    add_masses(shared, masses, warp, lane);
    // The first block writes what is kept: the newest tokens, then the sinks.
    if (block == 0) {
        int* const slots = all.selected_slots + pair * all.width;
        for (int each = thread; each < kept && each < all.width; each += THREADS)
            slots[each] = slot_at(all, row, bounds.kept_position(each));
    }
    if (warp == 0) {
        const int before = taken_before(all, pair, block, lane);
        if (lane == 0) shared.before = before;
    }
    sync_block();
    int others = shared.before;
    for (int each = 0; each < warp; ++each) others += shared.taken[each];
    for (int from = 0; from < count_taken; from += ROOM) {
        if (from > 0) part.find(own, cuts, from, lane);
        const int here = count_taken - from < ROOM ? count_taken - from : ROOM;
        for (int first = 0; first < here; first += Some::TOKENS) {
            if (from + first > 0) {
                some.look_up(taken, first, here, lane);
                some.weigh(taken, masses);
            }
            some.write(taken, others + from, kept);
        }
        sync_warp();
    }
    if (count_taken > Some::TOKENS) add_masses(shared, masses, warp, lane);
    sync_block();
    if (thread < PADDED) {
        int64 mass = 0;
        for (int each = 0; each < WARPS; ++each) mass += shared.masses[each][thread];
        all.taken[(static_cast<int64>(pair) * BLOCKS_OF_PAIR + block) * PADDED + thread] = mass;
    }
    sync_block();
    // On its way meanwhile.
    const Known known(all, row, pair, warp);
    if (thread == 0) shared.is_last = meet_at(all.met + pair, 1) == blocks - 1;
    sync_block();
    if (shared.is_last) finish(all, bounds, known, row, pair, blocks, warp, lane);
}
