// Attention to splits of selections. A warp goes through its own quarter of each tile and waits for no other, and only
// where a split ends do a block's warps add up. It copies whole vectors of the next tiles to shared memory of its own, over
// the ends of splits: memory is far away, and slow where a vector is read in parts.
//
// Scores are keys times queries (`products.cuh`), and outputs values times weights, both transposed: tokens, and then
// channels, are the 16 rows of a product, and query heads its 8 columns. So a group of up to 8 fills a product. In which
// order a product has channels in its rows is free, too: each lane has neighbouring ones, which it loads at once.

constexpr int THREADS = WARPS * WARP;
// Of a tile; the rows of a product.
constexpr int OWN_TOKENS = TILE / WARPS;
// Words of a value that a lane has, of 8 lanes; those that lie next to each other.
constexpr int VALUE_WORDS = HEAD_DIM / (8 * IN_WORD);
constexpr int VALUE_RUN = VALUE_WORDS < 4 ? VALUE_WORDS : 4;
constexpr int VALUE_RUNS = VALUE_WORDS / VALUE_RUN;
constexpr int VECTOR_BYTES = HEAD_DIM * ELEMENT_BYTES;
constexpr int VECTOR_RUNS = VECTOR_BYTES / 16;
// Outputs lie this far apart, so that lanes of different heads write to different banks.
constexpr int OUTPUT_STRIDE = HEAD_DIM + 4;
// What weights are relative to is raised where a score lies farther above it. Sums of floats are as precise below it as
// above; a weight of 16 bits ends at 65,504, and below 2^-14 it has fewer digits.
constexpr float SLACK = 8.0f;
constexpr float LIFT = COMPUTES_IN_HALVES ? 7.0f : 0.0f;

// Of a row whose patience is infinite nothing terminates.
constexpr float FOREVER = 3e38f;

static_assert(OWN_TOKENS == 16, "a warp's tokens are the rows of a product");
static_assert(VALUE_WORDS % VALUE_RUN == 0, "lanes load whole runs");

struct Arguments {
    const uint16* queries;
    const uint8* keys;
    const uint8* values;
    const int* page_table;
    const int* lengths;
    const int* slots;
    const int* counts;
    // Scale, direction and patience of each row's early termination; null where no row has any.
    const float* thresholds;
    float* outputs;
    float* masses;
    int64 row_stride;
    int64 head_stride;
    int64 table_stride;
    int64 width;
    // From one slot's keys and values, and from one head's, to the next.
    int slot_bytes;
    int head_bytes;
    int pairs;
    int page_bits;
    float scale_log2;
};

// Vectors of a warp's tokens of a tile, in runs of 16 bytes. Eight lanes read at a time: four runs of each of two
// neighbouring rows, or two runs of each of four rows, 2 apart. They lie so that each lane has banks of its own.
struct Vectors {
    uint4 runs[OWN_TOKENS * VECTOR_RUNS];

    DEVICE static int place_of(int row, int run) {
        const int place = row * VECTOR_RUNS + run;
        return place ^ (VECTOR_RUNS >= 8 ? (row & 6) ^ (row & 1) << 2 : place >> 2 & 6);
    }

    // So many words of a row, which lie in one run.
    template <int COUNT>
    DEVICE void read(uint32 (&words)[COUNT], int row, int first) const {
        const uint4& run = runs[place_of(row, first / 4)];
        load_words(words, reinterpret_cast<const uint32*>(&run) + first % 4);
    }
};

struct Stage {
    Vectors keys, values;
};

struct Shared {
    Stage stages[WARPS][STAGES];
    float outputs[WARPS][GROUP][OUTPUT_STRIDE];
    float references[WARPS][GROUP];
    float masses[WARPS][GROUP];
    int splits_of_warps[WARPS];
    // Splits of each pair and those before it, and each pair's tokens, negative for a whole context.
    int ends[PAIRS];
    int tokens[PAIRS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as many are asked for at a launch");

// How a selection is split: `run_of`, `spare_of` and `splits_of` of `attend.gpu_merge`.
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
DEVICE int quotient_up(int a, int b) { return (a + b - 1) / b; }
DEVICE int run_of(int tiles) {
    const int run = smaller(larger(quotient_up(tiles, RUNS_TO_FILL), SHORT_RUN), LONG_RUN);
    return larger(run, quotient_up(tiles, PARTIAL_SLOTS));
}
DEVICE int spare_of(int run) { return run / 2; }
DEVICE int splits_of(int tiles) {
    const int run = run_of(tiles);
    return quotient_up(larger(tiles - spare_of(run), smaller(tiles, 1)), run);
}

// Find out how many tokens each pair attends to, and how many splits that makes: each thread of neighbouring pairs.
DEVICE void count_splits(const Arguments& all, Shared& shared, int warp, int lane) {
    const int of_thread = quotient_up(all.pairs, THREADS);
    const int first = (warp * WARP + lane) * of_thread, last = smaller(first + of_thread, all.pairs);
    int own = 0;
    for (int pair = first; pair < last; ++pair) {
        const int row = pair / KV_HEADS, count = all.counts[pair], length = all.lengths[row];
        // Another kernel attends for rows that may terminate early.
        const bool may_stop = all.thresholds != nullptr && count != WHOLE_TO_THE_END &&
                              all.thresholds[3 * row + 2] < FOREVER;
        own += may_stop ? 0 : splits_of(quotient_up(count < 0 ? length : count, TILE));
        shared.tokens[pair] = may_stop ? 0 : count < 0 ? -length : count;
        shared.ends[pair] = own;
    }
    const int up_to = sum_up_to(own, lane);
    if (lane == WARP - 1) shared.splits_of_warps[warp] = up_to;
    sync_block();
    int before = up_to - own;
    for (int other = 0; other < warp; ++other) before += shared.splits_of_warps[other];
    for (int pair = first; pair < last; ++pair) shared.ends[pair] += before;
    sync_block();
}

// As many tokens where there is no tile any more.
constexpr int NO_TILE = -(1 << 30);

// A warp's tokens of a tile.
struct Tokens {
    int pair = 0;
    // How many there are of 16; all if there are more, none if fewer than one.
    int own = NO_TILE;
    // The split, if this is its last tile; else -1.
    int finished = -1;
    // Of this lane's token, or of the selection's last, if that comes before.
    int slot = 0;

    DEVICE bool is_any() const { return own != NO_TILE; }
};

// All tiles of this block, of one split after the other.
struct Walk {
    int item, pair = 0, split = 0, tokens = 0, tile = 0, end = 0;
    const int* table = nullptr;
    int bits = 0;

    DEVICE Walk() : item(block_number() - blocks_in_grid()) {}

    DEVICE Tokens next(const Arguments& all, const Shared& shared, int warp, int lane) {
        if (tile == end && !find_split(all, shared, lane)) return {};
        const int first = tile * TILE + warp * OWN_TOKENS, token = smaller(first + lane % OWN_TOKENS, tokens - 1);
        const int slot = (table[token >> bits] << bits) + (token & ((1 << bits) - 1));
        ++tile;
        return {pair, tokens - first, tile == end ? split : -1, slot};
    }

    DEVICE bool find_split(const Arguments& all, const Shared& shared, int lane) {
        item += blocks_in_grid();
        uint32 is_behind = 0;
        for (pair &= -WARP; pair < all.pairs; pair += WARP) {
            is_behind = ballot(pair + lane < all.pairs && shared.ends[pair + lane] > item);
            if (is_behind != 0) break;
        }
        if (is_behind == 0) return false;
        pair += first_bit(is_behind);
        split = item - (pair > 0 ? shared.ends[pair - 1] : 0);
        tokens = shared.tokens[pair];
        const bool whole = tokens < 0;
        tokens = whole ? -tokens : tokens;
        bits = whole ? all.page_bits : 0;
        // A selection is a table of pages of one slot.
        table = whole ? all.page_table + pair / KV_HEADS * all.table_stride : all.slots + pair * all.width;
        const int tiles = quotient_up(tokens, TILE), run = run_of(tiles);
        tile = split * run;
        end = tiles - (tile + run) <= spare_of(run) ? tiles : tile + run;
        return true;
    }
};

// What a lane has of the keys in a stage.
struct OwnKeys {
    const Vectors& vectors;
    int lane;

    DEVICE void read(uint32 (&words)[KEY_RUN], int half, int run) const {
        vectors.read(words, lane / 4 + 8 * half, (4 * run + lane % 4) * KEY_RUN);
    }
};

// Begin to copy the keys and values of a warp's tokens: of so many at once that each lane has 16 bytes.
DEVICE void copy(Stage& stage, const Arguments& all, const Tokens& tokens, int lane) {
    constexpr int ROWS = WARP / VECTOR_RUNS;
    const int run = lane % VECTOR_RUNS;
    const int64 own = tokens.pair % KV_HEADS * all.head_bytes + 16 * run;
    for (int first = 0; first < OWN_TOKENS; first += ROWS) {
        const int row = first + lane / VECTOR_RUNS, place = Vectors::place_of(row, run);
        const int64 from = own + static_cast<int64>(from_lane(tokens.slot, row)) * all.slot_bytes;
        copy_run<VECTOR_BYTES>(&stage.keys.runs[place], all.keys + from);
        copy_run<VECTOR_BYTES>(&stage.values.runs[place], all.values + from);
    }
}

// A running softmax of a warp's tokens. A lane has columns `lane % 4 * 2` and the next of each column tile; of masses the
// part of its rows.
struct Softmax {
    float references[HEAD_TILES][2], masses[HEAD_TILES][2], weighted[HEAD_TILES][PRODUCTS][4];

    DEVICE void clear() {
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            for (int column = 0; column < 2; ++column)
                references[tile][column] = NO_MASS, masses[tile][column] = 0.0f;
            for (int step = 0; step < PRODUCTS; ++step)
                for (int each = 0; each < 4; ++each) weighted[tile][step][each] = 0.0f;
        }
    }

    // Scores become weights, two of neighbouring rows in a word. Rows from `own` on are no tokens.
    DEVICE void weigh(uint32 (&weights)[HEAD_TILES][2], float (&scores)[HEAD_TILES][4], int own, float scale_log2,
                      int lane) {
        const bool has[2] = {lane / 4 < own, lane / 4 + 8 < own};
        float highest[HEAD_TILES][2];
        bool rises = false;
        for (int tile = 0; tile < HEAD_TILES; ++tile)
            for (int column = 0; column < 2; ++column) {
                float(&own_scores)[4] = scores[tile];
                for (int row = 0; row < 2; ++row) {
                    float& score = own_scores[2 * row + column];
                    score = has[row] ? score * scale_log2 : NO_MASS;
                }
                highest[tile][column] = fmaxf(own_scores[column], own_scores[2 + column]);
                rises |= highest[tile][column] > references[tile][column] + (SLACK + LIFT);
            }
        if (ballot(rises) != 0) raise(highest);
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            float own_weights[4];
            for (int each = 0; each < 4; ++each) {
                const float weight = power_of_two(scores[tile][each] - references[tile][each % 2]);
                // A warp that has had no token yet has no reference either.
                own_weights[each] = has[each / 2] ? weight : 0.0f;
                masses[tile][each % 2] += own_weights[each];
            }
            for (int row = 0; row < 2; ++row) {
                const float first = own_weights[2 * row], second = own_weights[2 * row + 1];
                weights[tile][row] =
                    transposed(COMPUTES_IN_HALVES ? pack_halves(first, second) : pack_bfloats(first, second));
            }
        }
    }

    // Bring references to the highest scores.
    DEVICE void raise(float (&highest)[HEAD_TILES][2]) {
        for (int tile = 0; tile < HEAD_TILES; ++tile)
            for (int column = 0; column < 2; ++column) {
                const float top = highest_of_lanes<4>(highest[tile][column]);
                const float reference = fmaxf(references[tile][column], top - LIFT);
                const float fade = power_of_two(references[tile][column] - reference);
                references[tile][column] = reference;
                masses[tile][column] *= fade;
                for (int step = 0; step < PRODUCTS; ++step)
                    for (int row = 0; row < 2; ++row) weighted[tile][step][2 * row + column] *= fade;
            }
    }

    // Add values by their weights. Rows `lane / 4` and that plus 8 of a step are two neighbouring channels of the lane.
    DEVICE void add(const uint32 (&weights)[HEAD_TILES][2], const Stage& stage, int lane) {
        for (int run = 0; run < VALUE_RUNS; ++run) {
            uint32 values[4][VALUE_RUN];
            for (int each = 0; each < 4; ++each)
                stage.values.read(values[each], lane % 4 * 2 + each % 2 + each / 2 * 8,
                                  (8 * run + lane / 4) * VALUE_RUN);
            for (int of_run = 0; of_run < VALUE_RUN; ++of_run) {
                uint32 of_tokens[4];
                for (int each = 0; each < 4; ++each) of_tokens[each] = values[each][of_run];
                add_word(run * VALUE_RUN + of_run, weights, of_tokens);
            }
        }
    }

    DEVICE void add_word(int word, const uint32 (&weights)[HEAD_TILES][2], const uint32 (&of_tokens)[4]) {
        if (IS_NARROW) {
            for (int pair = 0; pair < 2; ++pair) {
                const uint32 digits = pair == 0 ? 0x5140 : 0x7362;
                const uint32 low = choose_bytes(of_tokens[0], of_tokens[1], digits);
                const uint32 high = choose_bytes(of_tokens[2], of_tokens[3], digits);
                add_rows(2 * word + pair, weights, widen_to_halves(static_cast<uint16>(low)),
                         widen_to_halves(static_cast<uint16>(low >> 16)),
                         widen_to_halves(static_cast<uint16>(high)),
                         widen_to_halves(static_cast<uint16>(high >> 16)));
            }
        } else {
            add_rows(word, weights, choose_bytes(of_tokens[0], of_tokens[1], 0x5410),
                     choose_bytes(of_tokens[0], of_tokens[1], 0x7632),
                     choose_bytes(of_tokens[2], of_tokens[3], 0x5410),
                     choose_bytes(of_tokens[2], of_tokens[3], 0x7632));
        }
    }

    DEVICE void add_rows(int step, const uint32 (&weights)[HEAD_TILES][2], uint32 a0, uint32 a1, uint32 a2, uint32 a3) {
        for (int tile = 0; tile < HEAD_TILES; ++tile)
            multiply(weighted[tile][step], a0, a1, a2, a3, weights[tile][0], weights[tile][1]);
    }

    // Leave a warp's sums where others of its block find them.
    DEVICE void leave(Shared& shared, int warp, int lane) {
        for (int tile = 0; tile < HEAD_TILES; ++tile)
            for (int column = 0; column < 2; ++column) {
                const float mass = sum_of_lanes<4>(masses[tile][column]);
                const int head = 8 * tile + lane % 4 * 2 + column;
                if (head >= GROUP) continue;
                if (lane < 4) {
                    shared.references[warp][head] = references[tile][column];
                    shared.masses[warp][head] = mass;
                }
                // A lane's channels of a run of words lie next to each other.
                constexpr int PRODUCTS_OF_RUN = VALUE_RUN * IN_WORD / 2;
                for (int step = 0; step < PRODUCTS; step += 2) {
                    const int run = step / PRODUCTS_OF_RUN, of_run = step % PRODUCTS_OF_RUN;
                    const int channel = (run * 8 + lane / 4) * VALUE_RUN * IN_WORD + 2 * of_run;
                    const float(&first)[4] = weighted[tile][step];
                    const float(&second)[4] = weighted[tile][step + 1];
                    *reinterpret_cast<float4*>(&shared.outputs[warp][head][channel]) =
                        float4{first[column], first[2 + column], second[column], second[2 + column]};
                }
            }
    }
};

// Add up what a block's warps have of a split, and write it down.
DEVICE void finish(const Arguments& all, const Shared& shared, int pair, int split, int thread) {
    constexpr int IN_FOUR = HEAD_DIM / 4;
    for (int each = thread; each < GROUP * IN_FOUR; each += THREADS) {
        const int head = each / IN_FOUR, channel = each % IN_FOUR * 4;
        float highest = NO_MASS;
        for (int warp = 0; warp < WARPS; ++warp) highest = fmaxf(highest, shared.references[warp][head]);
        float mass = 0.0f;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int warp = 0; warp < WARPS; ++warp) {
            const float fade = power_of_two(shared.references[warp][head] - highest);
            const float4 own = *reinterpret_cast<const float4*>(&shared.outputs[warp][head][channel]);
            mass += shared.masses[warp][head] * fade;
            sum.x += own.x * fade, sum.y += own.y * fade, sum.z += own.z * fade, sum.w += own.w * fade;
        }
        const int64 result = (static_cast<int64>(pair) * GROUP + head) * PARTIAL_SLOTS + split;
        const float inverse = 1.0f / mass;
        *reinterpret_cast<float4*>(all.outputs + result * HEAD_DIM + channel) =
            float4{sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
        if (channel == 0) all.masses[result] = highest + log2f(mass);
    }
}

// Grid: as many blocks as the device takes at once, which take splits in turn.
KERNEL(THREADS, BLOCKS) attend_kernel(const Arguments all) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int thread = thread_number(), warp = thread / WARP, lane = thread % WARP;
    let_next_kernel_begin();
    wait_for_last_kernel();
    count_splits(all, shared, warp, lane);
    Walk walk;
    // Those of the stages, in order, and the ones after them. Slots come before what lies in them.
    Tokens tokens[STAGES + 1];
    for (int each = 0; each <= STAGES; ++each) tokens[each] = walk.next(all, shared, warp, lane);
    if (!tokens[0].is_any()) return;
    Stage(&stages)[STAGES] = shared.stages[warp];
    for (int each = 0; each < STAGES; ++each) {
        if (tokens[each].is_any()) copy(stages[each], all, tokens[each], lane);
        end_of_copies();
    }
    Queries queries;
    Softmax softmax;
    queries.load(all.queries, all.row_stride, all.head_stride, tokens[0].pair, lane);
    queries.convert();
    softmax.clear();
    int at = 0;
#pragma unroll 1
    while (tokens[0].is_any()) {
        const Tokens now = tokens[0], after = walk.next(all, shared, warp, lane);
        Stage& stage = stages[at];
        at = at + 1 < STAGES ? at + 1 : 0;
        float scores[HEAD_TILES][4] = {};
        uint32 weights[HEAD_TILES][2];
        wait_for_copies<STAGES - 1>();
        // Other lanes have waited for what this one reads, and later have read what it copies over.
        sync_warp();
        queries.score(scores, OwnKeys{stage.keys, lane});
        softmax.weigh(weights, scores, now.own, all.scale_log2, lane);
        softmax.add(weights, stage, lane);
        sync_warp();
        if (tokens[STAGES].is_any()) copy(stage, all, tokens[STAGES], lane);
        end_of_copies();
        for (int each = 0; each < STAGES; ++each) tokens[each] = tokens[each + 1];
        tokens[STAGES] = after;
        if (now.finished >= 0) {
            const bool is_other = tokens[0].is_any() && tokens[0].pair != now.pair;
            if (is_other) queries.load(all.queries, all.row_stride, all.head_stride, tokens[0].pair, lane);
            softmax.leave(shared, warp, lane);
            sync_block();
            finish(all, shared, now.pair, now.finished, thread);
            sync_block();
            softmax.clear();
            if (is_other) queries.convert();
        }
    }
}
