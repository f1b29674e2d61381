/* Threads instead of processes over _ring.c, for ThreadSanitizer: payloads are plain memory, so that every copy that the
 * counters do not order is reported as a race. Also checks what arrives, and ends if a wake-up is lost: waits have no
 * time limit here but that of the whole run.
 *
 * Rounds differ in readers, slots, spin and delays; in half of them readers expect messages within a window as wide as the
 * interval, so that they sleep, spin and sleep again in all places. In a third of them readers stop early, between a copy and its advance,
 * and are dropped, as after a death; in another third another thread ends the ring at some moment.
 */
#include "_ring.c"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_READERS = 8, MOST_SLOTS = 5, WORDS = 32, MESSAGES = 300, FOREVER = 60 };
enum { COMPLETE, READERS_LEAVE, INTERRUPTED, KINDS };

typedef struct {
    ring_t *ring;
    uint64_t slots[MOST_SLOTS][WORDS]; /* plain memory */
    uint32_t readers, count, kind;
    int64_t spin, share;
    unsigned seed;
} round_t;

typedef struct {
    round_t *round;
    uint32_t index;
    uint64_t messages; /* sent or received */
    int status;        /* what the last wait ended with */
    uint32_t windows;  /* slept up to, by a reader */
} side_t;

static void fail(const char *what) {
    fprintf(stderr, "FAILED: %s\n", what);
    exit(3);
}

static void dawdle(unsigned *seed) {
    switch (rand_r(seed) % 16) {
    case 0:
        sched_yield();
        break;
    case 1:
        usleep(rand_r(seed) % 100);
        break;
    }
}

static int64_t forever(void) { return now_ns() + FOREVER * 1000000000LL; }

static void *write_all(void *argument) {
    side_t *side = argument;
    round_t *round = side->round;
    end_t end = {.spin = round->spin, .spin_most = round->spin};
    unsigned seed = round->seed;
    while (end.sequence < MESSAGES) {
        const int64_t until = forever();
        while ((side->status = ring_await_room(round->ring, &end, until)) == PENDING)
            if (now_ns() >= until)
                fail("the writer was not woken");
        if (side->status != READY)
            break;
        for (int i = 0; i < WORDS; i++)
            round->slots[end.sequence % round->count][i] = end.sequence * 1000 + i;
        dawdle(&seed);
        ring_publish(round->ring, &end);
        dawdle(&seed);
    }
    side->messages = end.sequence;
    if (round->kind == COMPLETE)
        ring_end(round->ring);
    return NULL;
}

static void *read_all(void *argument) {
    side_t *side = argument;
    round_t *round = side->round;
    end_t end = {.spin = round->spin, .spin_most = round->spin, .index = side->index, .rhythm.share = round->share};
    unsigned seed = round->seed + 1 + side->index;
    const uint64_t leave = round->kind == READERS_LEAVE ? rand_r(&seed) % MESSAGES : MESSAGES + 1;
    for (;;) {
        const int64_t until = forever();
        while ((side->status = ring_await_message(round->ring, &end, until)) == PENDING)
            if (now_ns() >= until)
                fail("a reader was not woken");
        if (side->status != READY)
            break;
        uint64_t copy[WORDS];
        for (int i = 0; i < WORDS; i++) /* memcpy may become an instruction that the sanitizer does not see */
            copy[i] = round->slots[end.sequence % round->count][i];
        dawdle(&seed);
        for (int i = 0; i < WORDS; i++)
            if (copy[i] != end.sequence * 1000 + i)
                fail("a message is torn, lost or doubled");
        if (end.sequence == leave)
            break;
        if (ring_advance(round->ring, &end) != READY)
            fail("a reader was dropped that nobody dropped");
        dawdle(&seed);
    }
    side->messages = end.sequence;
    side->windows = end.rhythm.lateness.count;
    if (round->kind == READERS_LEAVE)
        ring_drop(round->ring, side->index);
    return NULL;
}

static void *end_it(void *argument) {
    round_t *round = argument;
    unsigned seed = round->seed + 100;
    usleep(rand_r(&seed) % 5000);
    ring_end(round->ring);
    return NULL;
}

static ring_t *new_ring(uint32_t readers, uint32_t slots) {
    const size_t bytes = (ring_bytes(readers) + 127) / 128 * 128;
    ring_t *ring = aligned_alloc(128, bytes);
    memset(ring, 0, bytes);
    ring_init(ring, readers, slots);
    return ring;
}

/* Waits of one thread whose time is over: they leave their own flag, and no other, as it was. */
static void take_flags_back(void) {
    ring_t *ring = new_ring(2, 2);
    end_t writer = {0}, reader = {.index = 1, .rhythm.share = SHARES};
    atomic_store(&ring->readers_doze.flags, 1); /* as if the other reader slept */
    if (ring_await_message(ring, &reader, now_ns() + 1000000) != PENDING || atomic_load(&ring->readers_doze.flags) != 1)
        fail("a wait has changed another's flag, or left its own");
    atomic_store(&ring->readers_doze.flags, 0);

    for (int i = 0; i < KEPT; i++)
        keep(&reader.rhythm.intervals, 100000000);
    reader.rhythm.heard = 1;
    for (int wait = 0; wait < 2; wait++) {
        reader.rhythm.stamp = wait ? reader.rhythm.stamp : now_ns();
        const int64_t until = now_ns() + 150000000;
        if (ring_await_message(ring, &reader, until) != PENDING || now_ns() < until)
            fail("a wait with a window has not lasted as long as it should");
        if (reader.rhythm.lateness.count != 1)
            fail("a message has not had one window");
        if (atomic_load(&ring->readers_doze.flags))
            fail("a reader that sleeps no more has left its flag");
    }
    ring_publish(ring, &writer);
    if (atomic_load(&ring->readers_doze.bell))
        fail("the writer has rung for nobody");
    free(ring);
}

static unsigned play(unsigned seed) {
    round_t round = {.seed = seed, .kind = seed % KINDS, .share = seed / KINDS % 2 * SHARES};
    round.readers = 1 + rand_r(&seed) % MOST_READERS;
    round.count = 1 + rand_r(&seed) % MOST_SLOTS;
    round.spin = (rand_r(&seed) % 3) * 10000;
    round.ring = new_ring(round.readers, round.count);

    pthread_t writer, reader[MOST_READERS], other;
    side_t writing = {.round = &round}, reading[MOST_READERS];
    pthread_create(&writer, NULL, write_all, &writing);
    for (uint32_t i = 0; i < round.readers; i++) {
        reading[i] = (side_t){.round = &round, .index = i};
        pthread_create(&reader[i], NULL, read_all, &reading[i]);
    }
    if (round.kind == INTERRUPTED)
        pthread_create(&other, NULL, end_it, &round);
    for (uint32_t i = 0; i < round.readers; i++)
        pthread_join(reader[i], NULL);
    pthread_join(writer, NULL);
    if (round.kind == INTERRUPTED)
        pthread_join(other, NULL);

    unsigned windows = 0;
    for (uint32_t i = 0; i < round.readers; i++) {
        windows += reading[i].windows;
        if (round.kind == COMPLETE && (reading[i].messages != MESSAGES || reading[i].status != ENDED))
            fail("a reader did not receive all");
        if (round.kind == INTERRUPTED && (reading[i].messages > writing.messages || reading[i].status != ENDED))
            fail("a reader received what was not sent, or was not ended");
    }
    if (round.kind == READERS_LEAVE && writing.messages < MESSAGES && writing.status != ALONE)
        fail("the writer was not told that it is alone");
    free(round.ring);
    return windows;
}

int main(int count, char **arguments) {
    const unsigned rounds = count > 1 ? atoi(arguments[1]) : 30;
    unsigned windows = 0;
    if (rounds)
        take_flags_back();
    for (unsigned i = 0; i < rounds; i++)
        windows += play(i);
    if (rounds && !windows)
        fail("nobody has expected a message");
    fprintf(stderr, "%u windows\n", windows);
    printf("%u rounds\n", rounds);
    return 0;
}
