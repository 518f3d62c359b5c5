// Scoring: every token's step, the masses of tiles, a list of the tokens that may be selected, and where selections end.
//
// A block of WARPS warps takes its share of all pairs' tiles, one warp a tile. From a sample of a pair's blocks and its
// last step's cut it expects where the cut will be, and lists and counts tokens from below there on. Whoever is the last
// to finish a pair knows its mass and cuts. A pair that was listed too short is listed once more by `list_again_kernel`,
// with what is known by then.

constexpr int WARPS = LIST_WARPS;
constexpr int THREADS = WARPS * WARP;
// Rounding by addition: a number below 2^22 leaves the nearest whole number in the lowest bits.
constexpr float ROUNDS = 12582912.0f;
constexpr int ROUNDS_BITS = 0x4B400000;

constexpr int CODE_BYTES = HEAD_DIM / 4;
constexpr int MEAN_BYTES = HEAD_DIM / 2;
constexpr int ROW_BYTES = TOKENS_IN_ROW * CODE_BYTES;
// Words of a row, and of a mean, that a lane holds.
constexpr int WORDS = ROW_BYTES / 16;
constexpr int MEAN_WORDS = MEAN_BYTES / 16;
constexpr int TOKENS_AT_ONCE = 16 * TOKENS_IN_ROW;
constexpr int SAMPLED_BLOCKS = 4;
// What a block could score in the time in which it begins and ends a pair.
constexpr int TILES_TO_BEGIN = 16;
// Threads that add up the masses of tiles: always as many, so that sums are the same to the last bit.
constexpr int SUMMING = 256;
// In units: from which mass on another unit is needed, and what is expected at most, so that such a mass is listed: of
// as many tokens as there may be, one holds a 2^-20th.
constexpr float MOST_MASS = 1e36f;
constexpr float MOST_EXPECTED = 1e28f;

struct alignas(16) Stage {
    // When they are scored, the listed tokens' steps lie in the place of their codes, and their places in that of means.
    union {
        uint8 codes[TILE * CODE_BYTES];
        uint32 steps[TILE * PADDED / 2];
    };
    union {
        uint8 means[BLOCKS_IN_TILE * MEAN_BYTES];
        uint8 places[TILE];
    };
    uint16 factors[TILE];
};

struct alignas(16) Shared {
    Stage stages[WARPS][2];
    Arrival arrivals[WARPS][2];
    // Steps of blocks' means, by columns.
    float means[WARPS][BLOCKS_IN_TILE][8];
    uint32 mean_levels[WARP][2 * MEAN_WORDS];
    int histograms[PADDED][BINS];
    float sampled[WARPS][PADDED];
    // Of columns, minus 15 times the sum of a query's levels.
    float sums[8];
    // What is known of a pair's query heads from before.
    float kept[PADDED];
    int anchor_tops[PADDED];
    int anchor_cuts[PADDED];
    // Steps of query heads; `first_bins` are relative to units.
    int units[PADDED];
    int starts[PADDED];
    int counted_from[PADDED];
    int first_bins[PADDED];
    int tops[PADDED];
    int ends[PAIRS];
    // The pairs that have tiles, how many these are, and the most tiles that one has.
    int16 acting[PAIRS];
    int acting_pairs, most_tiles;
    double share;
    int least;
    int is_last;
};

// Until the first tiles of the next pair are loaded.
DEVICE double* sums_of(Shared& shared) { return reinterpret_cast<double*>(&shared.stages[0][0]); }

// A pair's queries as a lane meets codes with them.
struct Query {
    uint32 codes[4][WORDS];
    // Of this lane's two query heads: what a quarter of two levels is worth, and three times the sum of all, in steps.
    float worths[2], sums[2];

    DEVICE void load(const Arguments& all, Shared& shared, int pair, int warp, int lane) {
        const int column = lane / 4, part = lane % 4, head = column % PADDED;
        const int64 of_heads = static_cast<int64>(pair) * STRIDE;
        const uint8* levels = reinterpret_cast<const uint8*>(all.levels) + (of_heads + head) * HEAD_DIM;
        for (int word = 0; word < WORDS; ++word) {
            // Four bytes of codes: 16 channels, of one token of the row.
            const int byte = 4 * (WORDS * part + word);
            const bool is_own = head < GROUP && byte / CODE_BYTES == column / PADDED;
            uint32 of_byte[4] = {0, 0, 0, 0};
            if (is_own) load_words(of_byte, levels + 4 * (byte % CODE_BYTES));
            uint32 low[2], high[2];
            for (int each = 0; each < 2; ++each) {
                const uint32 digits = each == 0 ? 0x5140 : 0x7362;
                low[each] = choose_bytes(of_byte[0], of_byte[1], digits);
                high[each] = choose_bytes(of_byte[2], of_byte[3], digits);
            }
            for (int plane = 0; plane < 4; ++plane)
                codes[plane][word] = choose_bytes(low[plane / 2], high[plane / 2], plane % 2 == 0 ? 0x5410 : 0x7632);
        }
        for (int each = 0; each < 2; ++each) {
            const int own = (2 * part + each) % PADDED;
            const bool is_head = own < GROUP;
            const float worth = is_head ? all.worths[of_heads + own] : 0.0f;
            const float sum = is_head ? worth * static_cast<float>(all.sums[of_heads + own]) : 0.0f;
            worths[each] = 0.5f * worth;
            sums[each] = -3.0f * sum;
            if (warp == 0 && column == 0) shared.sums[2 * part + each] = -15.0f * sum;
        }
        if (warp == 0)
            for (int word = 0; word < MEAN_WORDS; ++word) {
                uint32 of_bytes[2] = {0, 0};
                if (head < GROUP) load_words(of_bytes, levels + 8 * (MEAN_WORDS * part + word));
                shared.mean_levels[lane][2 * word] = choose_bytes(of_bytes[0], of_bytes[1], 0x6420);
                shared.mean_levels[lane][2 * word + 1] = choose_bytes(of_bytes[0], of_bytes[1], 0x7531);
            }
    }
};

// Where a pair's tokens are, as far as a warp loads them.
struct Source {
    const Arguments& all;
    const int* table;
    int kv_head, scored;

    // The block of the context's block `number`.
    DEVICE uint32 block(int number) const {
        const int last = scored / BLOCK - 1;
        number = number < last ? number : last;
        const uint32 in_page = static_cast<uint32>(number) % BLOCKS_IN_PAGE;
        return (table[static_cast<uint32>(number) / BLOCKS_IN_PAGE] * BLOCKS_IN_PAGE + in_page) * KV_HEADS + kv_head;
    }

    // Begin to load blocks; lane i holds the number of the i-th.
    template <int BLOCKS>
    DEVICE void load(Stage& stage, Arrival& arrival, uint32 own_block, int lane) const {
        constexpr int CODES = BLOCK * CODE_BYTES, FACTORS = BLOCK * sizeof(uint16);
        fence_copies();
        sync_warp();
        if (lane == 0) expect_bytes(arrival, BLOCKS * (CODES + MEAN_BYTES + FACTORS));
        if (lane < BLOCKS) {
            const uint64 block = own_block;
            copy_bytes(stage.codes + lane * CODES, all.codes + block * CODES, CODES, arrival);
            copy_bytes(stage.means + lane * MEAN_BYTES, all.means + block * MEAN_BYTES, MEAN_BYTES, arrival);
            copy_bytes(stage.factors + lane * BLOCK, all.factors + block * BLOCK, FACTORS, arrival);
        }
    }

    DEVICE float mean_factor(uint32 block) const { return all.mean_factors[block]; }
};

// Predicts blocks' mean scores, in steps, for all columns; blocks outside of [sinks, scored) have none. Lane i holds the
// factor of the i-th block's mean.
template <int BLOCKS>
DEVICE void score_means(Shared& shared, const Stage& stage, const Query& query, float own_factor, int first, int sinks, int scored, int warp, int lane) {
    const int row = lane / 4, part = lane % 4;
    uint32 words[MEAN_WORDS], levels[2 * MEAN_WORDS];
    for (uint32& word : words) word = 0;
    if (row < BLOCKS) load_words(words, stage.means + row * MEAN_BYTES + 4 * MEAN_WORDS * part);
    load_words(levels, shared.mean_levels[lane]);
    const float factor = from_lane(own_factor, row);
    int products[4] = {0, 0, 0, 0};
    for (int word = 0; word < MEAN_WORDS; word += 2)
        for (int plane = 0; plane < 2; ++plane)
            multiply_add(products, words[word] >> 4 * plane & 0x0f0f0f0f, 0, words[word + 1] >> 4 * plane & 0x0f0f0f0f, 0,
                         levels[2 * word + plane], levels[2 * word + 2 + plane]);
    if (row < BLOCKS) {
        const int token = first + row * BLOCK;
        for (int each = 0; each < 2; ++each) {
            const float product = static_cast<float>(products[each]);
            const float mean = multiply_then_add(product, 4 * query.worths[each], shared.sums[2 * part + each]);
            shared.means[warp][row][2 * part + each] =
                token < sinks || token >= scored ? NO_SCORE : mean * factor;
        }
    }
    sync_warp();
}

// What a lane reads of a stage.
struct Reader {
    const uint8* codes;
    const uint16* factors;
    const float* means;

    DEVICE Reader(const Stage& stage, const float (&of_warp)[BLOCKS_IN_TILE][8], int lane) {
        const int row = lane / 4, part = lane % 4;
        codes = stage.codes + row * ROW_BYTES + 4 * WORDS * part;
        factors = stage.factors + row * TOKENS_IN_ROW + 2 * part / PADDED;
        means = &of_warp[0][2 * part];
    }

    // A lane's scores of the `number`-th 16 rows: of its two query heads for a token of the first 8, then of the last 8.
    DEVICE void score(float (&scores)[4], const Query& query, int number) const {
        uint32 low[WORDS], high[WORDS];
        load_words(low, codes + 16 * number * ROW_BYTES);
        load_words(high, codes + (16 * number + 8) * ROW_BYTES);
        // Codes are masked where they stand, so that every second plane counts four times.
        int even[4] = {0, 0, 0, 0}, odd[4] = {ROUNDS_BITS, ROUNDS_BITS, ROUNDS_BITS, ROUNDS_BITS};
        for (int half = 0; half < 2; ++half)
            for (int word = 0; word < WORDS; word += 2) {
                const uint32 a0 = low[word] >> 4 * half, a1 = high[word] >> 4 * half;
                const uint32 a2 = low[word + 1] >> 4 * half, a3 = high[word + 1] >> 4 * half;
                const uint32 first = 0x03030303, second = 0x0c0c0c0c;
                const auto &of_even = query.codes[2 * half], &of_odd = query.codes[2 * half + 1];
                multiply_add(even, a0 & first, a1 & first, a2 & first, a3 & first, of_even[word], of_even[word + 1]);
                multiply_add(odd, a0 & second, a1 & second, a2 & second, a3 & second, of_odd[word], of_odd[word + 1]);
            }
        for (int half = 0; half < 2; ++half) {
            const int block = TOKENS_IN_ROW == 2 ? 2 * number + half : number;
            const float factor = from_half(factors[(16 * number + 8 * half) * TOKENS_IN_ROW]);
            for (int each = 0; each < 2; ++each) {
                const int place = 2 * half + each;
                const float product = as_float(4 * even[place] + odd[place]) - ROUNDS;
                const float value = multiply_then_add(product, query.worths[each], query.sums[each]);
                scores[place] = multiply_then_add(value, factor, means[8 * block + each]);
            }
        }
    }
};

// What a lane needs to weigh and to list the tokens of its two query heads. Steps are rounded by addition.
struct Marks {
    float to_logarithms[2], starts[2];
    int zeros[2];

    DEVICE void set_units(const Shared& shared, int part) {
        for (int each = 0; each < 2; ++each) {
            const int unit = shared.units[(2 * part + each) % PADDED];
            zeros[each] = ROUNDS_BITS + unit;
            to_logarithms[each] = -(ROUNDS + static_cast<float>(unit)) * (1.0f / STEPS);
        }
    }

    DEVICE void set_starts(const Shared& shared, int part) {
        for (int each = 0; each < 2; ++each)
            starts[each] = ROUNDS + static_cast<float>(shared.starts[(2 * part + each) % PADDED]);
    }

    DEVICE float mass(float shifted, int each) const {
        return power_of_two(multiply_then_add(shifted, 1.0f / STEPS, to_logarithms[each]));
    }
};

// The sum over the lanes whose columns are of the same query head.
DEVICE float sum_of_head(float number) {
    for (int mask = 4; mask < WARP; mask *= 2) number += from_xor(number, mask);
    if (TOKENS_IN_ROW == 2) number += from_xor(number, 2);
    return number;
}

// Which tokens of eight rows are listed, at their first lanes, by which lanes reach a start.
DEVICE uint32 listed_tokens(bool reaches) {
    uint32 any = ballot(reaches);
    any |= any >> 1;
    if (TOKENS_IN_ROW == 2) return any & 0x55555555;
    return (any | any >> 2) & 0x11111111;
}

// Count a step that is so much above what is counted from.
DEVICE void count_step(Shared& shared, int head, int bin, int step) {
    if (bin >= BINS - 1) {
        raise_atomically(&shared.tops[head], shared.units[head] + step);
        bin = BINS - 1;
    }
    add_atomically(&shared.histograms[head][bin], 1);
}

// Score a tile of a pair: its masses, and its list.
DEVICE void list_tile(const Arguments& all, Shared& shared, Stage& stage, const Query& query, const Marks& marks, float own_factor, const Bounds& bounds, int pair, int tile, int warp, int lane) {
    constexpr int LANES_OF_TOKEN = 4 / TOKENS_IN_ROW;
    const int part = lane % 4;
    score_means<BLOCKS_IN_TILE>(shared, stage, query, own_factor, tile * TILE, bounds.sinks, bounds.scored, warp, lane);
    const Reader reader(stage, shared.means[warp], lane);
    float masses[2] = {0.0f, 0.0f};
    int listed = 0;
    const int first_lane = lane / LANES_OF_TOKEN * LANES_OF_TOKEN;
    const uint32 own = 1u << first_lane;
    const int own_place = lane / 4 * TOKENS_IN_ROW + 2 * part / PADDED;
#pragma unroll
    for (int number = 0; number < TILE / TOKENS_AT_ONCE; ++number) {
        float shifted[4];
        reader.score(shifted, query, number);
        uint32 tokens[2];
        for (int half = 0; half < 2; ++half) {
            bool reaches = false;
            for (int each = 0; each < 2; ++each) {
                float& score = shifted[2 * half + each];
                score += ROUNDS;
                masses[each] += marks.mass(score, each);
                reaches |= score >= marks.starts[each];
            }
            tokens[half] = listed_tokens(reaches);
        }
        // All lanes have read these rows' codes, and entries are no longer than codes.
        if (tokens[0] | tokens[1]) {
            for (int half = 0; half < 2; ++half) {
                if (tokens[half] & own) {
                    const int entry = listed + bits_set(tokens[half] & (own - 1));
                    const int first = as_int(shifted[2 * half]) - marks.zeros[0];
                    const int second = as_int(shifted[2 * half + 1]) - marks.zeros[1];
                    stage.steps[entry * (PADDED / 2) + part % LANES_OF_TOKEN] = pack_int16(first, second);
                    if (lane == first_lane)
                        stage.places[entry] = static_cast<uint8>(own_place + (16 * number + 8 * half) * TOKENS_IN_ROW);
                }
                listed += bits_set(tokens[half]);
            }
        }
    }
    for (float& mass : masses) mass = sum_of_head(mass);
    const int64 of_tile = static_cast<int64>(pair) * all.tiles + tile;
    if (lane < PADDED / 2)
        *reinterpret_cast<float2*>(all.masses + of_tile * PADDED + 2 * lane) = float2{masses[0], masses[1]};
    if (lane == 0) all.counts[of_tile] = listed;
    sync_warp();
    const int64 of_tokens = pair * all.tokens + static_cast<int64>(tile) * TILE;
    for (int entry = lane; entry < listed; entry += WARP) {
        uint32 steps[PADDED / 2];
        load_words(steps, stage.steps + entry * (PADDED / 2));
        store_words(all.steps + (of_tokens + entry) * (PADDED / 2), steps);
        all.places[of_tokens + entry] = stage.places[entry];
        for (int word = 0; word < PADDED / 2; ++word) {
            for (int each = 0; each < 2; ++each) {
                const int head = 2 * word + each;
                const int step = static_cast<int16>(each == 0 ? steps[word] & 0xffff : steps[word] >> 16);
                const int bin = step - shared.first_bins[head];
                if (bin >= 0) count_step(shared, head, bin, step);
            }
        }
    }
}

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
    const float total = fminf(fmaxf(found, mass_of(last_top)), MOST_EXPECTED);
    const int floor = unit + floor_of(total);
    int start = unit + surest_start(shared.share, total, tokens) - STEPS;
    if (anchor >= 0 && floor + anchor - SPARE > start) start = floor + anchor - SPARE;
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
    double* const sums = sums_of(shared);
    if (thread < SUMMING) {
        double sum = 0.0;
        const float* masses = all.masses + static_cast<int64>(pair) * all.tiles * PADDED;
#pragma unroll 8
        for (int each = thread; each < tiles * PADDED; each += SUMMING) sum += load_shared_by_blocks(masses + each);
        sums[thread] = sum;
    }
    for (int half = SUMMING / 2; half >= PADDED; half /= 2) {
        sync_block();
        if (thread < half) sums[thread] += sums[thread + half];
    }
    sync_block();
}

// Cut a query head, of which all is known, or open it. One warp.
DEVICE void settle_head(const Arguments& all, Shared& shared, const Bounds& bounds, const Counts& counts, int row, int pair, int head, bool again, int lane) {
    const int64 of_head = static_cast<int64>(pair) * STRIDE + head, of_column = static_cast<int64>(pair) * PADDED + head;
    const int unit = shared.units[head], first = shared.counted_from[head], start = shared.starts[head];
    const float kept = kept_mass(shared.kept[head], unit);
    const float total = static_cast<float>(kept + sums_of(shared)[head]);
    // In another unit it is a number. What makes it so large is listed.
    const bool is_lost = !(total < MOST_MASS);
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
        all.pair_open[pair] = 1;
        all.any_open[0] = 1;
    } else {
        all.starts[of_column] = start;
        all.counted_from[of_column] = first;
        const int64 of_request = all.slots[row] * (KV_HEADS * GROUP) + pair % KV_HEADS * GROUP + head;
        const int anchor = shared.anchor_cuts[head], above = takes_all ? TOOK_EVERYTHING : cut.step - floor;
        all.anchor_tops[of_request] = top;
        // A low cut is remembered for a while: of neighbouring steps some need far more tokens than others.
        all.anchor_cuts[of_request] = !takes_all && anchor >= 0 && anchor + 1 < above ? anchor + 1 : above;
    }
    all.open[of_head] = is_open ? 1 : again && all.open[of_head] != 0 ? 2 : 0;
    // Marks of a byte, for what puts selections in order: the floor has one from 8 to 15.
    const int base = (floor - STEPS) & -STEPS;
    all.bases[of_head] = base;
    all.floors[of_head] = floor - base;
    all.totals[of_head] = total * mass_of(unit - base - STEPS_TO_FLOOR);
}

// Add up a pair that all of its tiles are known of, and cut; or open it, to be listed again.
DEVICE void settle(const Arguments& all, Shared& shared, const Bounds& bounds, int row, int pair, bool again, int thread) {
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

// How many tiles pairs have up to each one's last, and which have any.
DEVICE void count_tiles(const Arguments& all, Shared& shared, bool again, int thread) {
    const int pairs = all.rows * KV_HEADS;
    for (int pair = thread; pair < pairs; pair += THREADS) {
        const int tiles = Bounds(all, pair / KV_HEADS).tiles();
        shared.ends[pair] = again && (tiles == 0 || load_shared_by_blocks(all.pair_open + pair) == 0) ? 0 : tiles;
    }
    sync_block();
    if (thread < WARP) {
        int before = 0, acting = 0, most = 0;
        for (int begin = 0; begin < pairs; begin += WARP) {
            const int pair = begin + thread, tiles = pair < pairs ? shared.ends[pair] : 0;
            const uint32 act = ballot(tiles > 0);
            if (tiles > 0) shared.acting[acting + bits_set(act & ((1u << thread) - 1))] = static_cast<int16>(pair);
            acting += bits_set(act);
            most = tiles > most ? tiles : most;
            int end = tiles;
            for (int distance = 1; distance < WARP; distance *= 2) {
                const int of_others = from_lane(end, thread >= distance ? thread - distance : thread);
                if (thread >= distance) end += of_others;
            }
            end += before;
            if (pair < pairs) shared.ends[pair] = end;
            before = from_lane(end, WARP - 1);
        }
        for (int mask = 1; mask < WARP; mask *= 2) {
            const int other = from_xor(most, mask);
            most = other > most ? other : most;
        }
        if (thread == 0) shared.acting_pairs = acting, shared.most_tiles = most;
    }
    sync_block();
}

// What is known of a query head before its pair is scored.
struct Recalled {
    float kept = 0.0f;
    int anchor_top = UNKNOWN, anchor_cut = UNKNOWN, unit = 0, start = NEVER, counted_from = NEVER;

    template <bool AGAIN>
    DEVICE void load(const Arguments& all, int64 slot, int pair, int head) {
        if (head >= GROUP) return;
        const int64 of_column = static_cast<int64>(pair) * PADDED + head;
        const int64 of_request = slot * (KV_HEADS * GROUP) + pair % KV_HEADS * GROUP + head;
        kept = all.kept[static_cast<int64>(pair) * STRIDE + head];
        anchor_top = all.anchor_tops[of_request];
        anchor_cut = all.anchor_cuts[of_request];
        if (AGAIN) {
            unit = all.units[of_column];
            start = all.starts[of_column];
            counted_from = all.counted_from[of_column];
        } else {
            unit = unit_of(kept);
        }
    }

    DEVICE void store(Shared& shared, int head) const {
        shared.kept[head] = kept;
        shared.anchor_tops[head] = anchor_top;
        shared.anchor_cuts[head] = anchor_cut;
        shared.units[head] = unit;
        shared.starts[head] = start;
        shared.counted_from[head] = counted_from;
        shared.tops[head] = UNKNOWN;
    }
};

// The masses of a warp's sampled blocks.
DEVICE void weigh_sample(Shared& shared, const Stage& stage, const Query& query, const Marks& marks, float own_factor, int warp, int lane) {
    // Sampled blocks are no sinks, or as good as any.
    score_means<SAMPLED_BLOCKS>(shared, stage, query, own_factor, 0, 0, TILE, warp, lane);
    const Reader reader(stage, shared.means[warp], lane);
    float masses[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int number = 0; number < SAMPLED_BLOCKS * BLOCK / TOKENS_AT_ONCE; ++number) {
        float scores[4];
        reader.score(scores, query, number);
        for (int each = 0; each < 4; ++each) masses[each % 2] += marks.mass(scores[each] + ROUNDS, each % 2);
    }
    for (float& mass : masses) mass = sum_of_head(mass);
    if (lane < PADDED / 2) shared.sampled[warp][2 * lane] = masses[0], shared.sampled[warp][2 * lane + 1] = masses[1];
}

// List the tiles [begin, end) of a pair. Bit i of `parities` is that of the round that stage i waits for next.
template <bool AGAIN>
DEVICE void list_tiles(const Arguments& all, Shared& shared, uint32& parities, int pair, int begin, int end, int thread) {
    const int warp = thread / WARP, lane = thread % WARP, part = lane % 4;
    const int row = pair / KV_HEADS;
    const Bounds bounds(all, row);
    const Source source{all, all.page_table + row * all.table_stride, pair % KV_HEADS, bounds.scored};
    Stage(&stages)[2] = shared.stages[warp];
    Arrival(&arrivals)[2] = shared.arrivals[warp];
    // Whatever is loaded is on its way before anything is waited for.
    const int64 slot = all.slots[row];
    const double share = all.shares[row];
    const int least = all.least[row], own = lane % BLOCKS_IN_TILE;
    const int64 blocks = bounds.scored / BLOCK, each = warp * SAMPLED_BLOCKS + lane % SAMPLED_BLOCKS;
    int tile = begin + warp, stage = 0;
    const uint32 sampled = source.block(static_cast<int>((2 * each + 1) * blocks / (2 * WARPS * SAMPLED_BLOCKS)));
    uint32 block = source.block(tile * BLOCKS_IN_TILE + own);
    uint32 next_block = source.block((tile + WARPS) * BLOCKS_IN_TILE + own);
    if (!AGAIN) source.load<SAMPLED_BLOCKS>(stages[1], arrivals[1], sampled, lane);
    if (tile < end) source.load<BLOCKS_IN_TILE>(stages[0], arrivals[0], block, lane);
    const float sampled_factor = source.mean_factor(sampled);
    float factor = source.mean_factor(block);
    Recalled recalled;
    if (thread < PADDED) recalled.load<AGAIN>(all, slot, pair, thread);
    Query query;
    query.load(all, shared, pair, warp, lane);
    if (thread < PADDED) {
        recalled.store(shared, thread);
        if (!AGAIN) all.units[static_cast<int64>(pair) * PADDED + thread] = recalled.unit;
    }
    if (thread == 0) shared.share = share, shared.least = least;
    for (int bin = thread; bin < PADDED * BINS; bin += THREADS) (&shared.histograms[0][0])[bin] = 0;
    sync_block();
    Marks marks;
    marks.set_units(shared, part);
    if (!AGAIN) {
        wait_for_bytes(arrivals[1], parities >> 1 & 1);
        parities ^= 2;
        weigh_sample(shared, stages[1], query, marks, sampled_factor, warp, lane);
        sync_block();
        if (thread < GROUP) expect(shared, bounds, thread);
    }
    if (thread < PADDED) shared.first_bins[thread] = shared.counted_from[thread] - shared.units[thread];
    sync_block();
    marks.set_starts(shared, part);
#pragma unroll 1
    for (; tile < end; tile += WARPS) {
        const float own_factor = factor;
        if (tile + WARPS < end) source.load<BLOCKS_IN_TILE>(stages[1 - stage], arrivals[1 - stage], next_block, lane);
        factor = source.mean_factor(next_block);
        next_block = source.block((tile + 2 * WARPS) * BLOCKS_IN_TILE + own);
        wait_for_bytes(arrivals[stage], parities >> stage & 1);
        parities ^= 1 << stage;
        list_tile(all, shared, stages[stage], query, marks, own_factor, bounds, pair, tile, warp, lane);
        stage = 1 - stage;
    }
    sync_block();
    const int64 of_heads = static_cast<int64>(pair) * STRIDE;
    for (int bin = thread; bin < GROUP * BINS; bin += THREADS) {
        const int counted = (&shared.histograms[0][0])[bin];
        if (counted != 0) add_atomically(all.histograms + of_heads * BINS + bin, counted);
    }
    if (thread < GROUP && shared.tops[thread] != UNKNOWN) raise_atomically(all.tops + of_heads + thread, shared.tops[thread]);
    sync_block();
    if (thread == 0) {
        fence_blocks();
        const int known = add_atomically(all.met + pair, end - begin) + end - begin;
        shared.is_last = known == bounds.tiles();
        if (shared.is_last) all.met[pair] = 0;
        fence_blocks();
    }
    sync_block();
    if (shared.is_last) settle(all, shared, bounds, row, pair, AGAIN, thread);
}

// List this block's share of all pairs' tiles.
template <bool AGAIN>
DEVICE void list_share(const Arguments& all, Shared& shared) {
    const int thread = thread_number();
    if (thread % WARP == 0)
        for (Arrival& arrival : shared.arrivals[thread / WARP]) set_up(arrival);
    uint32 parities = 0;
    count_tiles(all, shared, AGAIN, thread);
    const int pairs = all.rows * KV_HEADS, total = shared.ends[pairs - 1], acting = shared.acting_pairs;
    if (acting == 0) return;
    const int share = (total + blocks_in_grid() - 1) / blocks_in_grid(), block = block_number();
    int begin = block * share, end = begin + share < total ? begin + share : total;
    // A pair's blocks have no other where that leaves none of them much more to do.
    const int of_pair = blocks_in_grid() / acting;
    if (of_pair > 0 && shared.most_tiles <= of_pair * (share + TILES_TO_BEGIN)) {
        if (block / of_pair >= acting) return;
        const int pair = shared.acting[block / of_pair];
        const int first = pair > 0 ? shared.ends[pair - 1] : 0, after = shared.ends[pair];
        const int own = (after - first + of_pair - 1) / of_pair;
        begin = first + block % of_pair * own;
        end = begin + own < after ? begin + own : after;
    }
    while (begin < end) {
        int low = 0, high = pairs - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (shared.ends[middle] > begin)
                high = middle;
            else
                low = middle + 1;
        }
        const int first = low > 0 ? shared.ends[low - 1] : 0;
        const int after = shared.ends[low] < end ? shared.ends[low] : end;
        list_tiles<AGAIN>(all, shared, parities, low, begin - first, after - first, thread);
        begin = after;
        sync_block();
    }
}

// Grid: as many blocks as the device takes at once.
KERNEL(THREADS, 2) list_kernel(const Arguments all) {
    DYNAMIC_SHARED(memory);
    list_share<false>(all, *reinterpret_cast<Shared*>(memory));
}

// The pairs that are open. Grid: the same.
KERNEL(THREADS, 2) list_again_kernel(const Arguments all) {
    if (load_shared_by_blocks(all.any_open) == 0) return;
    DYNAMIC_SHARED(memory);
    list_share<true>(all, *reinterpret_cast<Shared*>(memory));
}
