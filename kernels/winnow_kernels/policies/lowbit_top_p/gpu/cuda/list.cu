// Scoring: every token's step, the masses of tiles, a list of the tokens that may be selected, and where selections
// end.
//
// A block of WARPS warps takes its share of all pairs' tiles, one warp a tile. From a sample of a pair's blocks and its
// last step's cut it expects where the cut will be, and lists and counts tokens from below there on. Whoever is the
// last to finish a pair knows its mass and cuts. A pair that was listed too short is listed once more by
// `list_again_kernel`, with what is known by then.

// A lane's two query heads, added up over the lanes that have the same two: one of the sums, `own_head`'s.
DEVICE float sum_of_head(float (&numbers)[2], int lane) {
    const float sum = own_sum_of_lanes<4>(numbers, lane);
    return TOKENS_IN_ROW == 2 ? sum + from_xor(sum, 2) : sum;
}
// The query head whose sum a lane has; −1 where another lane has it, too.
DEVICE int own_head(int lane) { return lane < 8 && lane % 4 < PADDED / 2 ? lane % 4 * 2 + lane / 4 : -1; }

// Which tokens of eight rows are listed, at their first lanes, by which lanes reach a start.
DEVICE uint32 listed_tokens(bool reaches) {
    uint32 any = ballot(reaches);
    any |= any >> 1;
    if (TOKENS_IN_ROW == 2) return any & 0x55555555;
    return (any | any >> 2) & 0x11111111;
}

// Tokens of a tile, 32 a word: each lane looks after one of a word's.
struct Own {
    uint32 bit, before;
    int place;

    DEVICE Own(int lane) : bit(1u << lane), before(0) {
        // Halves of sixteen rows lie one behind the other in a tile, and bit by bit interleaved in a word.
        const uint32 of_half = HALVES_IN_WORD == 2 ? 0x55555555 : 0x11111111;
        const int half = lane % HALVES_IN_WORD;
        for (int other = 0; other < half; ++other) before |= of_half << other;
        before |= of_half << half & (bit - 1);
        place = half * (32 / HALVES_IN_WORD) + lane / HALVES_IN_WORD;
    }
};

// Write down which tokens of a scored tile are listed, in their order, and return how many.
DEVICE int write_places(Stage& stage, const bool (&reaches)[TILE / (8 * TOKENS_IN_ROW)], const Own& own) {
    uint32 words[TILE / 32];
    for (int word = 0; word < TILE / 32; ++word) {
        words[word] = 0;
        for (int half = 0; half < HALVES_IN_WORD; ++half)
            words[word] |= listed_tokens(reaches[word * HALVES_IN_WORD + half]) << half;
    }
    // By now all lanes have read their codes, where places and scores are written.
    sync_warp();
    int listed = 0;
    for (int word = 0; word < TILE / 32; ++word) {
        if (words[word] & own.bit)
            stage.scored.places[listed + bits_set(words[word] & own.before)] =
                static_cast<uint8>(32 * word + own.place);
        listed += bits_set(words[word]);
    }
    return listed;
}

// Count an entry's steps, by query heads.
DEVICE void count_entry(Shared& shared, const uint32 (&steps)[PADDED / 2], const int (&below_bins)[PADDED]) {
    bool exceeds = false;
    for (int head = 0; head < PADDED; ++head) {
        const int bin = step_in(steps, head) - below_bins[head];
        exceeds |= bin >= BINS;
        // Whatever it is, without a branch: what is below all bins has one, too.
        add_atomically(&shared.histograms[head][clamp(bin, 0, BINS)], 1);
    }
    if (exceeds)
        for (int head = 0; head < PADDED; ++head) {
            const int step = step_in(steps, head);
            if (step - below_bins[head] >= BINS) raise_atomically(&shared.tops[head], shared.units[head] + step);
        }
}

// Score a tile of a pair: its masses, and its list.
DEVICE void list_tile(const Arguments& all, Shared& shared, Stage& stage, const Query& query, const Marks& marks,
                      const Own& own, const Bounds& bounds, int pair, int tile, int warp, int lane) {
    score_means<BLOCKS_IN_TILE>(shared, stage, query, tile * TILE, bounds.sinks, bounds.scored, warp, lane);
    const Reader reader(stage, shared.means[warp], lane);
    float masses[2] = {0.0f, 0.0f};
    constexpr int NUMBERS = TILE / TOKENS_AT_ONCE;
    float scores[NUMBERS][4];
    bool reaches[2 * NUMBERS];
#pragma unroll
    for (int number = 0; number < NUMBERS; ++number) {
        reader.score(scores[number], query, number);
        for (int half = 0; half < 2; ++half) {
            bool reaches_any = false;
            for (int each = 0; each < 2; ++each) {
                float& score = scores[number][2 * half + each];
                score += ROUNDS;
                masses[each] += marks.mass(score, each);
                reaches_any |= score >= marks.starts[each];
            }
            reaches[2 * number + half] = reaches_any;
        }
    }
    const int listed = write_places(stage, reaches, own);
    uint32* const of_lane = &stage.scored.scores[0][0] + 2 * lane;
#pragma unroll
    for (int number = 0; number < NUMBERS; ++number)
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint2*>(of_lane + (2 * number + half) * 64) =
                uint2{static_cast<uint32>(as_int(scores[number][2 * half])),
                      static_cast<uint32>(as_int(scores[number][2 * half + 1]))};
    const float mass = sum_of_head(masses, lane);
    const int own_mass = own_head(lane);
    const int64 of_tile = static_cast<int64>(pair) * all.tiles + tile;
    if (own_mass >= 0) all.masses[of_tile * PADDED + own_mass] = mass;
    if (lane == 0) all.counts[of_tile] = listed;
    sync_warp();
    const int64 of_tokens = pair * all.tokens + static_cast<int64>(tile) * TILE;
    int below_bins[PADDED];
    for (int head = 0; head < PADDED; ++head) below_bins[head] = shared.below_bins[head];
    for (int entry = lane; entry < listed; entry += WARP) {
        const uint8 place = stage.scored.places[entry];
        uint32 shifted[PADDED], steps[PADDED / 2];
        load_words(shifted, stage.scored.scores[place]);
        for (int head = 0; head < PADDED; head += 2)
            steps[head / 2] = pack_int16(static_cast<int>(shifted[head]) - (ROUNDS_BITS + shared.units[head]),
                                         static_cast<int>(shifted[head + 1]) - (ROUNDS_BITS + shared.units[head + 1]));
        store_words(all.steps + (of_tokens + entry) * (PADDED / 2), steps);
        all.places[of_tokens + entry] = place;
        count_entry(shared, steps, below_bins);
    }
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
            const int end = before + sum_up_to(tiles, thread);
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

// The masses of a warp's sampled blocks.
DEVICE void weigh_sample(Shared& shared, const Stage& stage, const Query& query, const Marks& marks, int warp,
                         int lane) {
    // Sampled blocks are no sinks, or as good as any.
    score_means<SAMPLED_BLOCKS>(shared, stage, query, 0, 0, TILE, warp, lane);
    const Reader reader(stage, shared.means[warp], lane);
    float masses[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int number = 0; number < SAMPLED_BLOCKS * BLOCK / TOKENS_AT_ONCE; ++number) {
        float scores[4];
        reader.score(scores, query, number);
        for (int each = 0; each < 4; ++each) masses[each % 2] += marks.mass(scores[each] + ROUNDS, each % 2);
    }
    const float mass = sum_of_head(masses, lane);
    const int own_mass = own_head(lane);
    if (own_mass >= 0) shared.sampled[warp][own_mass] = mass;
}

// List the tiles [begin, end) of a pair. Bit i of `parities` is that of the round that stage i waits for next.
template <bool AGAIN>
DEVICE void list_tiles(const Arguments& all, Shared& shared, uint32& parities, int pair, int begin, int end,
                       int thread) {
    const int warp = thread / WARP, lane = thread % WARP, part = lane % 4;
    const int row = pair / KV_HEADS;
    const Bounds bounds(all, row);
    const Source source{all, all.page_table + row * all.table_stride, pair % KV_HEADS, bounds.scored};
    // What later kernels need to know of a pair, one block writes down.
    const bool writes = !AGAIN && begin == 0;
    Stage(&stages)[STAGES] = shared.stages[warp];
    Arrival(&arrivals)[STAGES] = shared.arrivals[warp];
    // Whatever is loaded is on its way before anything is waited for.
    const int64 slot = all.slots[row];
    const double share = all.shares[row];
    const int least = all.least[row];
    const int64 blocks = bounds.scored / BLOCK, each = warp * SAMPLED_BLOCKS + lane % SAMPLED_BLOCKS;
    int tile = begin + warp, stage = 0, free = STAGES - 1;
    const uint32 sampled = source.block(static_cast<int>((2 * each + 1) * blocks / (2 * WARPS * SAMPLED_BLOCKS)));
    uint32 first_blocks[STAGES];
    for (int each = 0; each < STAGES; ++each)
        first_blocks[each] = source.first_of_run(tile + each * WARPS, lane);
    Unprepared unprepared;
    if (!AGAIN) unprepared.load(all, bounds, pair, warp, lane);
    Recalled recalled;
    if (thread < PADDED) recalled.load<AGAIN>(all, slot, pair, thread);
    uint32 next_block = first_blocks[STAGES - 1];
    if (!AGAIN) source.load<SAMPLED_BLOCKS, 1>(stages[free], arrivals[free], sampled, lane);
    for (int each = 0; each < STAGES - 1; ++each)
        if (tile + each * WARPS < end)
            source.load<BLOCKS_IN_TILE, BLOCKS_IN_RUN>(stages[each], arrivals[each], first_blocks[each], lane);
    if (AGAIN)
        read_prepared(all, shared, pair, thread);
    else
        prepare(all, shared, unprepared, bounds, pair, writes, thread);
    const float kept = !AGAIN && warp == 0 ? kept_steps(shared, lane) : 0.0f;
    if (thread < PADDED) {
        if (!AGAIN && thread < GROUP) recalled.begin(kept);
        recalled.store(shared, thread);
        if (writes && thread < GROUP) all.kept[static_cast<int64>(pair) * STRIDE + thread] = kept;
        if (writes) all.units[static_cast<int64>(pair) * PADDED + thread] = recalled.unit;
    }
    Query query;
    query.load(shared, warp, lane);
    if (thread == 0) shared.share = share, shared.least = least;
    for (int bin = thread; bin < PADDED * (1 + BINS); bin += THREADS) (&shared.histograms[0][0])[bin] = 0;
    sync_block();
    Marks marks;
    marks.set_units(shared, part);
    if (!AGAIN) {
        wait_for_bytes(arrivals[free], parities >> free & 1);
        parities ^= 1 << free;
        weigh_sample(shared, stages[free], query, marks, warp, lane);
        sync_block();
        if (thread < GROUP) expect(shared, bounds, thread);
    }
    if (thread < PADDED) shared.below_bins[thread] = shared.counted_from[thread] - 1 - shared.units[thread];
    sync_block();
    marks.set_starts(shared, part);
    const Own own_token(lane);
#pragma unroll 1
    for (; tile < end; tile += WARPS) {
        if (tile + (STAGES - 1) * WARPS < end)
            source.load<BLOCKS_IN_TILE, BLOCKS_IN_RUN>(stages[free], arrivals[free], next_block, lane);
        next_block = source.first_of_run(tile + STAGES * WARPS, lane);
        wait_for_bytes(arrivals[stage], parities >> stage & 1);
        parities ^= 1 << stage;
        list_tile(all, shared, stages[stage], query, marks, own_token, bounds, pair, tile, warp, lane);
        free = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    sync_block();
    const int64 of_heads = static_cast<int64>(pair) * STRIDE;
    for (int bin = thread; bin < GROUP * BINS; bin += THREADS) {
        const int counted = shared.histograms[bin / BINS][1 + bin % BINS];
        if (counted != 0) add_atomically(all.histograms + of_heads * BINS + bin, counted);
    }
    if (thread < GROUP && shared.tops[thread] != UNKNOWN)
        raise_atomically(all.tops + of_heads + thread, shared.tops[thread]);
    sync_block();
    if (thread == 0) {
        const int known = meet_at(all.met + pair, end - begin) + end - begin;
        shared.is_last = known == bounds.tiles();
        if (shared.is_last) all.met[pair] = 0;
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
    int first_pair = 0, last_pair = pairs - 1;
    // A pair's blocks have no other where that leaves none of them much more to do.
    const int of_pair = blocks_in_grid() / acting;
    if (of_pair > 0 && shared.most_tiles <= of_pair * (share + TILES_TO_BEGIN)) {
        if (block / of_pair >= acting) return;
        const int pair = first_pair = last_pair = shared.acting[block / of_pair];
        const int first = pair > 0 ? shared.ends[pair - 1] : 0, after = shared.ends[pair];
        const int own = (after - first + of_pair - 1) / of_pair;
        begin = first + block % of_pair * own;
        end = begin + own < after ? begin + own : after;
    }
    while (begin < end) {
        int low = first_pair, high = last_pair;
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
    wait_for_last_kernel();
    let_next_kernel_begin();
    DYNAMIC_SHARED(memory);
    list_share<false>(all, *reinterpret_cast<Shared*>(memory));
}

// The pairs that are open. Grid: any number of blocks that the device takes at once.
KERNEL(THREADS, 2) list_again_kernel(const Arguments all) {
    // As a rule this one has nothing to do, and the next waits for it with all that it needs.
    let_next_kernel_begin();
    wait_for_last_kernel();
    if (load_shared_by_blocks(all.any_open) == 0) return;
    DYNAMIC_SHARED(memory);
    list_share<true>(all, *reinterpret_cast<Shared*>(memory));
}
