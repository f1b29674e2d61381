/* Synchronization of a ring in shared memory: which slots may be written and read, and how a process sleeps. Linux.
 *
 * One writer, many readers, a fixed number of slots. The caller owns the contents of slots (but see ring_offer):
 *
 *     writer: ring_await_room, fill slot `end.sequence % slots`, ring_publish; ring_announce at any time
 *     reader: ring_await_message, copy slot `end.sequence % slots`, ring_advance
 *
 * Data. `published` and each reader's `received` count messages in 64 bits and only grow; each is written by one process.
 * The writer stores `published` after it has filled the slot, and a reader loads `published` before it copies; a reader
 * stores `received` after it has copied, and the writer loads `received` before it fills the slot again. Stores release
 * and loads acquire, so no reader sees half a message, and a message whose writer died in the middle is never seen.
 *
 * Sleep. A process that finds nothing to do spins for a limited time, then
 *     1. reads the bell, 2. sets its flag, 3. looks again, 4. sleeps if the bell is still what it was in 1,
 *     5. clears its flag, if that is still set.
 * The bell is the futex word. The other end makes its change, and if any flag is set, clears all flags, rings the bell
 * (adds one) and wakes all sleepers with one system call. Setting the flag, looking, changing and testing the flags are
 * sequentially consistent: either the sleeper sees the change in 3, or the other end sees the flag. In the second case
 * the bell rings after 1, and 4 does not sleep. A flag left behind by a dead process costs one system call. A process
 * that dies before it rings leaves sleepers, which wake by their timeout or by ring_end.
 *
 * Announcements. A sleeping processor takes up to some hundred microseconds to wake in a virtual machine, so only a reader
 * that is awake when the message comes receives it immediately. The writer may therefore announce a message while it
 * still prepares it: it stores the time of the announcement, and wakes readers as for a message. For a sleeping reader an
 * announcement is a change like a message (it looks for both in 3, and when it wakes); it then spins for the message, and
 * if none comes sleeps again, by all five steps:
 *
 *     last message                  announced                                       announced + announce
 *          |------------ sleeps --------|.. wakes ..|-- spins, until the message comes --|-- sleeps for good --
 *
 * A budget limits this spinning to a share of the time. A reader does not spin for an announcement that is too old, or
 * for longer than its budget covers; the message clears the announcement, and a reader never spins twice for one. So
 * announcements that no message follows, however many, cost that share and no more.
 *
 * Flags are one bit per reader, since a reader that wakes must not clear another reader's flag; when all readers are
 * awake, the writer sees no flag and makes no system call.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_ring.h"

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Sleep while the bell is `value`, until CLOCK_MONOTONIC is `until`, or a signal comes. Shared between processes. */
static void sleep_on(_Atomic uint32_t *bell, uint32_t value, int64_t until) {
    const struct timespec time = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    const int saved = errno;
    syscall(SYS_futex, bell, FUTEX_WAIT_BITSET, value, &time, NULL, FUTEX_BITSET_MATCH_ANY);
    errno = saved;
}

static void ring_the_bell(_Atomic uint32_t *bell) {
    const int saved = errno;
    atomic_fetch_add(bell, 1);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    errno = saved;
}

static void wake(doze_t *doze) {
    if (atomic_load(&doze->flags) && atomic_exchange(&doze->flags, 0))
        ring_the_bell(&doze->bell);
}

uint64_t ring_slowest(ring_t *ring) {
    uint64_t slowest = atomic_load(&ring->published);
    for (uint32_t i = 0; i < ring->readers; i++) {
        const uint64_t received = atomic_load(&ring->reader[i].received);
        if (!atomic_load(&ring->reader[i].gone) && received < slowest)
            slowest = received;
    }
    return slowest;
}

static int room(ring_t *ring, end_t *end) {
    if (atomic_load(&ring->ended))
        return ENDED;
    if (!atomic_load(&ring->live))
        return ALONE;
    if (end->sequence < end->room)
        return READY;
    end->room = ring_slowest(ring) + ring->slots;
    return end->sequence < end->room ? READY : PENDING;
}

/* `ended` before `published`: what was sent before the end is received. */
static int message(ring_t *ring, end_t *end) {
    const uint32_t ended = atomic_load(&ring->ended);
    if (atomic_load(&ring->reader[end->index].gone))
        return ALONE;
    if (atomic_load(&ring->published) != end->sequence)
        return READY;
    return ended ? ENDED : PENDING;
}

/* Condition that ends a reader's sleep. */
static int message_or_announcement(ring_t *ring, end_t *end) {
    const int found = message(ring, end);
    const int64_t announced = atomic_load(&ring->announced);
    return found == PENDING && announced && announced != end->heeded ? ANNOUNCED : found;
}

typedef int (*look_t)(ring_t *, end_t *);

/* Set the spinning time of the next wait: the maximum if this wait was shorter than that, else half of this wait's. After
 * long waits no process spins, and one short wait is enough to spin again. */
static void adapt(end_t *end, int found, int64_t waited) {
    end->spin = found == READY && waited <= end->spin_most ? end->spin_most : end->spin / 2;
}

static inline int64_t earlier(int64_t one, int64_t other) { return one < other ? one : other; }

/* generous: yield the processor to other processes, such as the one that is waited for. */
static inline int spin(ring_t *ring, end_t *end, look_t look, int64_t until, int generous) {
    int found = PENDING;
    while (found == PENDING && now_ns() < until) {
        for (int i = 0; i < 16 && found == PENDING; i++) {
            relax();
            found = look(ring, end);
        }
        if (generous && found == PENDING)
            sched_yield();
    }
    return found;
}

/* Where a wait sleeps: the futex, its flag there, and the condition that ends the sleep. */
typedef struct {
    doze_t *doze;
    uint64_t bit;
    look_t look;
} bed_t;

/* The five steps of sleep. */
static int sleep_until(ring_t *ring, end_t *end, bed_t bed, int64_t until) {
    doze_t *doze = bed.doze;
    const uint32_t bell = atomic_load(&doze->bell);
    atomic_fetch_or(&doze->flags, bed.bit);
    int found = bed.look(ring, end);
    if (found == PENDING) {
        sleep_on(&doze->bell, bell, until);
        found = bed.look(ring, end);
    }
    if (atomic_load(&doze->flags) & bed.bit)
        atomic_fetch_and(&doze->flags, ~bed.bit);
    return found;
}

/* Whether the budget covers `ns` nanoseconds of spinning at `now`. */
int budget_covers(budget_t *budget, int64_t now, int64_t ns) {
    budget->saved = earlier(budget->saved + (now - budget->at) / SHARES * budget->share, budget->most);
    budget->at = now;
    return ns <= budget->saved;
}

void budget_pay(budget_t *budget, int64_t ns) { budget->saved -= earlier(ns, budget->saved); }

/* Spin for the announced message while the announcement is recent. The budget must cover all of that time: if messages
 * come late in it, every shorter spin would be in vain. */
static int heed(ring_t *ring, end_t *end, int64_t until) {
    const int64_t announced = atomic_load(&ring->announced);
    const int64_t begin = now_ns(), finish = earlier(announced + end->announce, until);
    int found = PENDING;
    if (begin < finish && budget_covers(&end->budget, begin, finish - begin)) {
        found = spin(ring, end, message, finish, 1);
        budget_pay(&end->budget, now_ns() - begin);
    }
    if (found == PENDING)
        end->heeded = announced;
    return found;
}

/* Wait until `look` returns something other than PENDING, at most until `until` (CLOCK_MONOTONIC, ns); a signal also ends
 * the wait, with PENDING. stamp: time of the event waited for; NULL: unknown, the end of the wait counts. */
static inline int await(ring_t *ring, end_t *end, look_t look, bed_t bed, _Atomic int64_t *stamp, int64_t until) {
    int found = look(ring, end);
    if (found != PENDING)
        return found;
    const int64_t begin = now_ns();
    if (begin >= until)
        return PENDING;
    found = spin(ring, end, look, earlier(begin + end->spin, until), 0);
    if (found == PENDING)
        found = sleep_until(ring, end, bed, until);
    while (found == ANNOUNCED) {
        found = heed(ring, end, until);
        if (found == PENDING)
            found = sleep_until(ring, end, bed, until);
    }
    const int64_t finish = found == READY && stamp ? atomic_load_explicit(stamp, memory_order_relaxed) : now_ns();
    adapt(end, found, finish - begin);
    return found;
}

/* Size of ring_t for a number of readers. */
int64_t ring_bytes(uint32_t readers) { return (int64_t)(sizeof(ring_t) + readers * sizeof(reader_t)); }

/* Initialize zeroed memory that no other process has. */
void ring_init(ring_t *ring, uint32_t readers, uint32_t slots) {
    ring->readers = readers;
    ring->slots = slots;
    atomic_store(&ring->live, readers);
}

int ring_await_room(ring_t *ring, end_t *end, int64_t until) {
    return await(ring, end, room, (bed_t){&ring->writer_dozes, 1, room}, NULL, until);
}

void ring_publish(ring_t *ring, end_t *end) {
    atomic_store_explicit(&ring->stamp, now_ns(), memory_order_relaxed);
    atomic_store_explicit(&ring->announced, 0, memory_order_relaxed);
    atomic_store(&ring->published, ++end->sequence);
    wake(&ring->readers_doze);
}

/* Announce that the next message follows soon. */
void ring_announce(ring_t *ring, end_t *end) {
    if (!end->announce)
        return;
    atomic_store(&ring->announced, now_ns());
    wake(&ring->readers_doze);
}

int ring_await_message(ring_t *ring, end_t *end, int64_t until) {
    const bed_t bed = {&ring->readers_doze, (uint64_t)1 << end->index, message_or_announcement};
    return await(ring, end, message, bed, &ring->stamp, until);
}

/* Free the slot after a copy. ALONE: the reader was dropped meanwhile and the slot may have been refilled, so the copy is
 * not a message. `gone` is read by a write that changes nothing: a processor may reorder the loads of the slot behind a
 * later load, but not behind a later write. */
int ring_advance(ring_t *ring, end_t *end) {
    reader_t *reader = &ring->reader[end->index];
    if (atomic_fetch_or(&reader->gone, 0))
        return ALONE;
    atomic_store(&reader->received, ++end->sequence);
    wake(&ring->writer_dozes);
    return READY;
}

void ring_drop(ring_t *ring, uint32_t index) {
    if (!atomic_exchange(&ring->reader[index].gone, 1))
        atomic_fetch_sub(&ring->live, 1);
    ring_the_bell(&ring->writer_dozes.bell);
    ring_the_bell(&ring->readers_doze.bell); /* the reader itself, if it is alive */
}

int ring_ended(ring_t *ring) { return (int)atomic_load(&ring->ended); }

void ring_end(ring_t *ring) {
    atomic_store(&ring->ended, 1);
    ring_the_bell(&ring->readers_doze.bell);
    ring_the_bell(&ring->writer_dozes.bell);
}

/* The next two functions handle a message that fits into a slot in one call instead of several: after some milliseconds
 * of other work each call from Python takes several microseconds. */

/* Send a message if it fits and there is room now; return whether it was sent. */
int ring_offer(ring_t *ring, end_t *end, const slots_t *slots, const void *message, uint64_t bytes) {
    if (bytes > slots->bytes || room(ring, end) != READY)
        return 0;
    unsigned char *slot = slots->memory + end->sequence % ring->slots * slots->stride;
    const header_t header = {.bytes = bytes};
    memcpy(slot, &header, sizeof header);
    memcpy(slot + sizeof header, message, bytes);
    ring_publish(ring, end);
    return 1;
}

/* Wait for a message and copy it to `out`; return its size, or -1 if none was received: ring_await_message then returns
 * why, READY for a message that is not in its slot. */
int64_t ring_take(ring_t *ring, end_t *end, const slots_t *slots, void *out, int64_t until) {
    if (ring_await_message(ring, end, until) != READY)
        return -1;
    const unsigned char *slot = slots->memory + end->sequence % ring->slots * slots->stride;
    header_t header;
    memcpy(&header, slot, sizeof header);
    if (header.offset || header.bytes > slots->bytes)
        return -1;
    memcpy(out, slot + sizeof header, header.bytes);
    return ring_advance(ring, end) == READY ? (int64_t)header.bytes : -1;
}
