/* Threads instead of processes over _ring.c, for ThreadSanitizer: payloads are plain memory, so that every copy that the
 * counters do not order is reported as a race. Also checks what arrives, and ends if a wake-up is lost: waits have no
 * time limit here but that of the whole run.
 *
 * Rounds differ in readers, slots, spin and delays; in half of them the writer announces at random, sometimes a message
 * that it does not send for long, and readers may spin for all of it, so that they sleep, spin and sleep again in all
 * places. In a third of them readers stop early, between a copy and its advance, and are dropped, as after a death; in
 * another third another thread ends the ring at some moment. In half of them messages are sent by ring_offer and received by
 * ring_take.
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
    header_t header;
    uint64_t words[WORDS];
} slot_t;

typedef struct {
    ring_t *ring;
    slot_t memory[MOST_SLOTS]; /* plain memory */
    slots_t slots;
    uint32_t readers, count, kind, at_once;
    int64_t spin, announce;
    unsigned seed;
} round_t;

typedef struct {
    round_t *round;
    uint32_t index;
    uint64_t messages; /* sent or received */
    int status;        /* what the last wait ended with */
    int heeded;        /* whether a reader has ever heeded an announcement */
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

static end_t new_end(uint32_t index, int64_t spin, int64_t announce) {
    const budget_t budget = {.share = SHARES, .most = 2 * announce};
    return (end_t){.index = index, .spin = spin, .spin_most = spin, .announce = announce, .budget = budget};
}

/* Whether a message may be refused though there was room for it. */
static int over(ring_t *ring) { return ring_ended(ring) || !atomic_load(&ring->live); }

static int64_t forever(void) { return now_ns() + FOREVER * 1000000000LL; }

static void *write_all(void *argument) {
    side_t *side = argument;
    round_t *round = side->round;
    end_t end = new_end(0, round->spin, round->announce);
    unsigned seed = round->seed;
    while (end.sequence < MESSAGES) {
        const int64_t until = forever();
        while ((side->status = ring_await_room(round->ring, &end, until)) == PENDING)
            if (now_ns() >= until)
                fail("the writer was not woken");
        if (side->status != READY)
            break;
        uint64_t words[WORDS];
        for (int i = 0; i < WORDS; i++)
            words[i] = end.sequence * 1000 + i;
        if (round->at_once) {
            if (ring_offer(round->ring, &end, &round->slots, words, sizeof words + 1))
                fail("a message was sent that is too long for a slot");
            if (!ring_offer(round->ring, &end, &round->slots, words, sizeof words) && !over(round->ring))
                fail("a message for which there was room was not sent");
        } else {
            for (int i = 0; i < WORDS; i++)
                round->memory[end.sequence % round->count].words[i] = words[i];
            dawdle(&seed);
            ring_publish(round->ring, &end);
        }
        dawdle(&seed);
        while (rand_r(&seed) % 2) {
            ring_announce(round->ring, &end);
            dawdle(&seed);
        }
    }
    side->messages = end.sequence;
    if (round->kind == COMPLETE)
        ring_end(round->ring);
    return NULL;
}

static void *read_all(void *argument) {
    side_t *side = argument;
    round_t *round = side->round;
    end_t end = new_end(side->index, round->spin, round->announce);
    unsigned seed = round->seed + 1 + side->index;
    const uint64_t leave = round->kind == READERS_LEAVE ? rand_r(&seed) % MESSAGES : MESSAGES + 1;
    for (;;) {
        const int64_t until = forever();
        const uint64_t sequence = end.sequence;
        const int at_once = round->at_once && sequence != leave;
        uint64_t copy[WORDS];
        for (side->status = PENDING; side->status == PENDING;) {
            if (now_ns() >= until)
                fail("a reader was not woken");
            if (!at_once)
                side->status = ring_await_message(round->ring, &end, until);
            else if (ring_take(round->ring, &end, &round->slots, copy, until) == sizeof copy)
                side->status = READY;
            else if ((side->status = ring_await_message(round->ring, &end, 0)) == READY)
                side->status = PENDING; /* it has come since */
        }
        if (side->status != READY)
            break;
        if (!at_once) {
            for (int i = 0; i < WORDS; i++) /* memcpy may become an instruction that the sanitizer does not see */
                copy[i] = round->memory[sequence % round->count].words[i];
            dawdle(&seed);
        }
        for (int i = 0; i < WORDS; i++)
            if (copy[i] != sequence * 1000 + i)
                fail("a message is torn, lost or doubled");
        if (sequence == leave)
            break;
        if (!at_once && ring_advance(round->ring, &end) != READY)
            fail("a reader was dropped that nobody dropped");
        dawdle(&seed);
    }
    side->messages = end.sequence;
    side->heeded = end.budget.at != 0;
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
    end_t reader = new_end(1, 0, 0);
    atomic_store(&ring->readers_doze.flags, 1); /* as if the other reader slept */
    if (ring_await_message(ring, &reader, now_ns() + 1000000) != PENDING || atomic_load(&ring->readers_doze.flags) != 1)
        fail("a wait has changed another's flag, or left its own");
    free(ring);
}

/* A reader that comes after an announcement spins for it once, and waits for as long as it was asked to. */
static void heed_late(void) {
    const int64_t most = 10000000;
    ring_t *ring = new_ring(1, 2);
    end_t writer = new_end(0, 0, most), reader = new_end(0, 0, most), deaf = new_end(0, 0, 0);
    ring_announce(ring, &deaf);
    if (atomic_load(&ring->announced))
        fail("something was announced, though announcements are ignored");
    for (int announcement = 0; announcement < 2; announcement++) {
        ring_announce(ring, &writer);
        const int64_t announced = atomic_load(&ring->announced);
        if (ring_await_message(ring, &deaf, now_ns() + 1000000) != PENDING || deaf.budget.at)
            fail("an announcement was heeded that should be ignored");
        for (int wait = 0; wait < 2; wait++) {
            const int64_t begin = now_ns();
            if (ring_await_message(ring, &reader, begin + 2 * most) != PENDING || now_ns() < begin + 2 * most)
                fail("a wait in which a message was announced has not lasted as long as it should");
            if (reader.heeded != announced || (wait && reader.budget.at >= begin))
                fail("an announcement was not heeded once");
            if (atomic_load(&ring->readers_doze.flags))
                fail("a reader that sleeps no more has left its flag");
        }
    }
    const int64_t saved = reader.budget.saved;
    ring_announce(ring, &writer);
    usleep(2 * most / 1000);
    if (ring_await_message(ring, &reader, now_ns() + 1000000) != PENDING || reader.budget.saved != saved)
        fail("a reader has spun for an announcement that is too old");
    ring_publish(ring, &writer);
    if (atomic_load(&ring->announced))
        fail("a message has not cleared its announcement");
    if (ring_await_message(ring, &reader, now_ns()) != READY || atomic_load(&ring->readers_doze.bell))
        fail("a message was not received, or the writer has rung for nobody");
    free(ring);
}

static void *receive(void *argument) {
    side_t *side = argument;
    end_t end = new_end(0, 0, FOREVER * 1000000000LL);
    side->status = ring_await_message(side->round->ring, &end, forever());
    return NULL;
}

/* A reader that sleeps is woken by the announcement, once, and not by the message, for which it spins. */
static void wake_once(void) {
    round_t round = {.ring = new_ring(1, 2)};
    end_t writer = new_end(0, 0, FOREVER * 1000000000LL);
    side_t side = {.round = &round};
    pthread_t reader;
    pthread_create(&reader, NULL, receive, &side);
    while (!atomic_load(&round.ring->readers_doze.flags))
        usleep(100);
    ring_announce(round.ring, &writer);
    if (atomic_load(&round.ring->readers_doze.bell) != 1)
        fail("an announcement has not woken a reader");
    usleep(10000);
    ring_announce(round.ring, &writer);
    ring_publish(round.ring, &writer);
    pthread_join(reader, NULL);
    if (side.status != READY || atomic_load(&round.ring->readers_doze.bell) != 1)
        fail("a reader that was woken by an announcement has not spun for the message");
    free(round.ring);
}

static unsigned play(unsigned seed) {
    round_t round = {.seed = seed, .kind = seed % KINDS, .announce = seed / KINDS % 2 * 200000};
    round.at_once = seed / KINDS / 2 % 2;
    round.slots = (slots_t){(unsigned char *)round.memory, sizeof(slot_t), sizeof round.memory[0].words};
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

    unsigned heeded = 0;
    for (uint32_t i = 0; i < round.readers; i++) {
        heeded += reading[i].heeded;
        if (round.kind == COMPLETE && (reading[i].messages != MESSAGES || reading[i].status != ENDED))
            fail("a reader did not receive all");
        if (round.kind == INTERRUPTED && (reading[i].messages > writing.messages || reading[i].status != ENDED))
            fail("a reader received what was not sent, or was not ended");
    }
    if (round.kind == READERS_LEAVE && writing.messages < MESSAGES && writing.status != ALONE)
        fail("the writer was not told that it is alone");
    free(round.ring);
    return heeded;
}

int main(int count, char **arguments) {
    const unsigned rounds = count > 1 ? atoi(arguments[1]) : 30;
    unsigned heeded = 0;
    if (rounds) {
        take_flags_back();
        heed_late();
        wake_once();
    }
    for (unsigned i = 0; i < rounds; i++)
        heeded += play(i);
    if (rounds && !heeded)
        fail("nobody has heeded an announcement");
    fprintf(stderr, "%u readers have heeded announcements\n", heeded);
    printf("%u rounds\n", rounds);
    return 0;
}
