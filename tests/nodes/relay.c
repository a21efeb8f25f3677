/* Carries IP packets between nodes with a delay and a limited bandwidth.
 *
 *     relay DELAY_US MBIT_PER_S PID...
 *
 * Node i is the network namespace of process PID i. The relay creates the device "net0" in it and
 * prints "ready" when it has created all of them. The address of node i is 10.77.0.(i + 1). Each
 * node has a link of MBIT_PER_S in each direction (0: unlimited), and a packet takes DELAY_US longer
 * than its transmission. No packet is lost. The relay ends when its standard input closes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_NODES = 8, MAX_PACKET = 65536, DESTINATION = 16 /* offset in an IPv4 header */ };

struct packet {
    struct packet *next;
    int64_t arrival_ns;
    ssize_t size;
    unsigned char data[];
};

struct node {
    int device;
    struct packet *first, **last; /* on their way to this node, in the order of arrival */
    int64_t sent_ns, received_ns; /* when its link has transmitted what was queued */
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int open_device(const char *pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0) fail(path);
    close(space);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "net0");
    if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
    return device;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static void accept_packets(struct node *nodes, int num_nodes, struct node *from, int64_t delay_ns,
                           int64_t mbit) {
    static unsigned char data[MAX_PACKET];
    ssize_t size;
    while ((size = read(from->device, data, sizeof data)) > 0) {
        int to = data[DESTINATION + 3] - 1;
        if (data[0] >> 4 != 4 || to < 0 || to >= num_nodes) continue;
        struct node *target = &nodes[to];
        int64_t transmission_ns = mbit ? size * 8000 / mbit : 0;
        from->sent_ns = later(from->sent_ns, now_ns()) + transmission_ns;
        target->received_ns =
            later(from->sent_ns + delay_ns, target->received_ns + transmission_ns);
        struct packet *packet = malloc(sizeof *packet + size);
        if (packet == NULL) fail("malloc");
        *packet = (struct packet){.arrival_ns = target->received_ns, .size = size};
        memcpy(packet->data, data, size);
        *target->last = packet;
        target->last = &packet->next;
    }
}

/* Deliver what has arrived; return when the next packet arrives, 0 if there is none. */
static int64_t deliver(struct node *node) {
    struct packet *packet;
    while ((packet = node->first) != NULL && packet->arrival_ns <= now_ns()) {
        if (write(node->device, packet->data, packet->size) < 0) perror("write");
        node->first = packet->next;
        if (node->first == NULL) node->last = &node->first;
        free(packet);
    }
    return packet == NULL ? 0 : packet->arrival_ns;
}

int main(int argc, char **argv) {
    int num_nodes = argc - 3;
    if (num_nodes < 1 || num_nodes > MAX_NODES) {
        fprintf(stderr, "usage: relay DELAY_US MBIT_PER_S PID...\n");
        return 2;
    }
    int64_t delay_ns = atoll(argv[1]) * 1000, mbit = atoll(argv[2]);
    struct node nodes[MAX_NODES] = {0};
    struct pollfd files[MAX_NODES + 1];
    for (int i = 0; i < num_nodes; i++) {
        nodes[i].device = open_device(argv[3 + i]);
        nodes[i].last = &nodes[i].first;
        files[i] = (struct pollfd){.fd = nodes[i].device, .events = POLLIN};
    }
    files[num_nodes] = (struct pollfd){.fd = 0, .events = POLLIN};
    /* Ranks poll and occupy all cores; the network must not wait for them. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    prctl(PR_SET_TIMERSLACK, 1L);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = 0;
        for (int i = 0; i < num_nodes; i++) {
            int64_t arrival = deliver(&nodes[i]);
            if (arrival && (!next || arrival < next)) next = arrival;
        }
        int64_t wait = later(next - now_ns(), 0);
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        if (ppoll(files, num_nodes + 1, next ? &timeout : NULL, NULL) < 0) fail("ppoll");
        if (files[num_nodes].revents) return 0;
        for (int i = 0; i < num_nodes; i++)
            if (files[i].revents & POLLIN)
                accept_packets(nodes, num_nodes, &nodes[i], delay_ns, mbit);
    }
}
